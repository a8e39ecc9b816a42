# SPDX-License-Identifier: Apache-2.0

# %% [markdown]
# # Choose a schedule
#
# A schedule says in which order each device runs its forwards and backwards. The result of training
# is the same under all of them. Time and memory are not. This tutorial compares schedules for four
# devices with the simulator, which needs no accelerator. The [playground](../playground.md) shows
# the same interactively.
#
# We measure time in forwards of a whole device: a micro-batch takes each device 1 for the forward
# F, and 2 for the backward B. Some schedules split B into I, the gradient of the input, and W, the
# gradient of the weights, which take 1 each.

# %%
import pathlib
import shlex
import subprocess
import sys
import tempfile

from lingvo_gpipe import schedule_search, schedule_svg, schedules, simulator

K = 4  # Devices.


def Step(name, num_micro_batches, per_device=1, policy='none', **more):
  """Simulates a step; each device has `per_device` stages of equal size."""
  schedule = schedules.Get(name, per_device * K, num_micro_batches, K)
  costs = simulator.Costs(forward=1 / per_device, **more)
  # A stage keeps an input of 0.25 for each micro-batch, and a device 3 of other activations.
  sizes = simulator.ActivationSizes(stage_input=0.25, inner=3 / per_device)
  return simulator.Simulate(schedule, costs, remat_policy=policy, sizes=sizes)


schedule_svg.Draw(Step('gpipe', 4))

# %% [markdown]
# A blue box is a forward and a green one a backward, with the number of its micro-batch. The grey
# area below is the number of micro-batches whose activations the device holds.
#
# ## More micro-batches
#
# The gaps are the bubble: the pipeline fills and drains, and devices wait. With M micro-batches a
# device waits for (K-1)/(M+K-1) of the step. So take many micro-batches, as long as each is large
# enough to keep a device busy.

# %%
for m in (4, 8, 16, 32):
  result = Step('gpipe', m)
  print(f'M={m:2}  bubble {result.overall_bubble:.1%}, by the formula {(K - 1) / (m + K - 1):.1%}')

# %% [markdown]
# ## Memory
#
# `gpipe` runs all forwards first, so it holds the activations of all micro-batches. `1f1b` begins
# with the backwards as early as possible. It takes as long, and holds at most K micro-batches.

# %%
for name in ('gpipe', '1f1b'):
  for m in (8, 32):
    result = Step(name, m)
    print(f'{name:5}  M={m:2}  step {result.makespan:g}  memory {max(result.device_peak_bytes):g}')

# %% [markdown]
# ## Other schedules
#
# With two stages on each device the bubble shrinks, because a stage takes half as long. If B is
# split, W fills the time of waiting. The schedules in a V save memory without recomputation.

# %%
M = 8
print(f'{"":16} stages  step  bubble  memory')
for name, per_device in [
  ('gpipe', 1), ('1f1b', 1), ('zb_h1', 1), ('zb_2p', 1), ('interleaved_1f1b', 2),
  ('interleaved_zb', 2), ('zb_v', 2), ('v_half', 2), ('v_min', 2),
]:  # fmt: skip
  result = Step(name, M, per_device)
  print(
    f'{name:16} {per_device * K:6}  {result.makespan:4g}  {result.overall_bubble:6.1%}'
    f'  {max(result.device_peak_bytes):6.2f}'
  )

# %% [markdown]
# `zb_v` and `interleaved_zb` have the shortest steps. This is `zb_v`. The second stage of a device
# is paler, I is turquoise, and W is orange:

# %%
schedule_svg.Draw(Step('zb_v', M, 2))

# %% [markdown]
# ## Recomputation
#
# With `remat_policy='stage'` a stage keeps its input only, and repeats its forward before B or I,
# so each backward takes one forward longer. That saves the most memory if B is whole. If it is
# split, all activations stay from I to W.

# %%
for name, per_device in (('gpipe', 1), ('1f1b', 1), ('zb_v', 2)):
  for policy in ('none', 'stage'):
    result = Step(name, M, per_device, policy)
    memory = max(result.device_peak_bytes)
    print(f'{name:5}  {policy:5}  step {result.makespan:4g}  memory {memory:5.2f}')

# %% [markdown]
# ## Slow links
#
# A transfer that takes time delays each schedule differently. `gpipe` waits while it fills and
# drains. `1f1b` waits with each micro-batch, and with two stages on a device there are more
# transfers.

# %%
print(f'{"transfer":16}', *(f'{transfer:5}' for transfer in (0, 0.1, 0.25, 0.5)))
for name, per_device in (('gpipe', 1), ('1f1b', 1), ('zb_h1', 1), ('zb_2p', 1), ('zb_v', 2)):
  steps = [Step(name, M, per_device, transfer=t).makespan for t in (0, 0.1, 0.25, 0.5)]
  print(f'{name:16}', *(f'{step:5.1f}' for step in steps))

# %% [markdown]
# ## The best order for your times
#
# Real stages are not equal. `schedule_search.Search` looks for the shortest step for given times
# and sizes within a limit of memory, and is never worse than a named schedule that fits.

# %%
costs = simulator.Costs(forward=(1, 1, 1, 1.5), weight_gradient=(0.5, 1, 1, 1.5), transfer=0.1)
sizes = simulator.ActivationSizes(stage_input=0.25, inner=3)
best = schedule_search.Search(K, M, K, costs, remat_policy='none', sizes=sizes, memory_limit=12)
for name in ('1f1b', 'zb_h1', 'zb_2p'):
  named = simulator.Simulate(schedules.Get(name, K, M), costs, remat_policy='none', sizes=sizes)
  print(f'{name:6}  step {named.makespan:5.1f}  memory {max(named.device_peak_bytes):5.2f}')
print(f'search  step {best.makespan:5.1f}  memory {max(best.device_peak_bytes):5.2f}')
print(best.schedule.ToText())

# %% [markdown]
# Here none of the three fits into a limit of 12, and the search finds an order that does and is as
# short as the best of them.
#
# ## The planner
#
# The simulator compares orders for a given cut. The planner, `tools.plan` in a checkout, chooses
# for an experiment on given devices: the number of replicas, stages and micro-batches, the cut, the
# schedule and the recomputation. It predicts steps by the FLOPs of the layers and a
# [description of the devices](../scaling.md), or measures both. Here it measures the layers of a
# small Transformer on two logical CPU devices, and looks for the best plan with two stages.

# %%
folder = tempfile.TemporaryDirectory()
EXPERIMENT = (
  '--platform=cpu', '--model=lm.stdlib.ByteTransformerGPipe2',
  '--model_params_override=task.num_layers:4;input.max_bytes:100000;input.batch_size:8',
  '--model_params_override=task.train.eval_datasets:[]',
)  # fmt: skip


def Run(*command):
  """Runs a program, and returns the lines that it prints."""
  command = [sys.executable, '-m', *command]
  done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  assert done.returncode == 0, done.stdout
  return done.stdout.splitlines()


lines = Run(
  'tools.plan', *EXPERIMENT, '--measure', '--measured_sizes=2', '--num_stages=2',
  '--num_replicas=1', '--stages_per_device=1', '--schedules=gpipe,1f1b,zb_h1',
)  # fmt: skip
print(*lines[lines.index('') + 1 : -2], sep='\n')

# %% [markdown]
# The first row is the chosen plan, and the next table changes one thing of it. The last line is the
# command that runs the plan.
#
# ## A profile of real steps
#
# We run that command for eight steps, of which the profiler records 6 to 8.

# %%
command = lines[-3].replace('LOGDIR', folder.name)
flags = shlex.split(command)[1:]
flags += ['--platform=cpu', '--max_steps=8', '--profile_steps=6,8']
lines = Run('lingvo_gpipe.trainer', *flags)
profiled = next(line for line in lines if line.startswith('profiled steps'))
print(*profiled.split('; '), sep='\n')

# %% [markdown]
# The profiler also writes a page with a timeline of each step. This is the last one. For each
# device there are two rows. The upper row has the measured times. The lower one is the plan: the
# same actions, each with the mean of its measured times, and without any overhead.

# %%
(page,) = pathlib.Path(folder.name).glob('timeline_*.html')
pictures = page.read_text().split('<svg')[1:]
folder.cleanup()
schedule_svg.Svg('<svg' + pictures[-1].partition('</svg>')[0] + '</svg>')

# %% [markdown]
# How to read it:
#
# - **Gaps in both rows** come from the schedule or from the cut. Take another schedule, more
#   micro-batches, or `task.stack.partition_by:time`, which balances measured times.
# - **Gaps in the upper row only** are overhead: the time between actions, and whatever else keeps
#   the devices busy. When this page was built, another tutorial ran on the same cores.
# - **One box that is wider than the others of its colour** was slow only once. Look at another step
#   before you change anything.
#
# ## Try it
#
# The schedule that the search found goes where a name goes: `p.stack.schedule = best.schedule`. A
# named one needs no code: `--model_params_override=task.stack.schedule:zb_h1`.
# [Schedules](../schedules.md) has all names and formulas, [Profile](../profiling.md) the
# flags, and [Scaling](../scaling.md) what the planner knows.
