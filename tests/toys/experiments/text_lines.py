# SPDX-License-Identifier: Apache-2.0
"""An experiment on text files."""

from lingvo_gpipe import registry, task, text_files


@registry.RegisterSingleTaskModel
class Lines(registry.SingleTaskModelParams):
  """Lines of text."""

  def Train(self):
    return text_files.TextFilesInput.Params().Set(
      name='lines', file_pattern='*.txt', vocab_filepath='vocab/lines.model', vocab_size=400,
      batch_size=1, max_documents=600,
    )  # fmt: skip

  def Task(self):
    return task.BaseTask.Params().Set(name='task')
