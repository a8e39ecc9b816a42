# SPDX-License-Identifier: Apache-2.0
"""Completion of the programs' command lines in bash and zsh.

`trainer --completion=bash` prints a script with the flags and their values. Only the keys of
experiments depend on the working directory: for them the script runs this module, which lists them
without TensorFlow.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection

from absl import flags

from lingvo_gpipe.experiment import registry

SHELLS = ('bash', 'zsh')

_FILES = ('cluster', 'export_dir', 'logdir', 'model_params_file_override', 'xla_cache')
_VALUES = {'checkpoint': ['last', 'best'], 'split': ['Train', 'Dev', 'Test']}

# zsh has the functions of bash in `bashcompinit`. Bash begins a word after `=`, zsh does not.
_SCRIPT = r"""_@PROGRAM@_completion() {
  local line="${COMP_LINE:0:$COMP_POINT}" flag= prefix= word= words=
  local value="${line##* }" before="${line% *}"
  before="${before##* }"
  if [[ $value == --*=* ]]; then
    flag="${value%%=*}"
    value="${value#*=}"
    [[ $COMP_WORDBREAKS == *=* ]] || prefix="$flag="
  elif [[ $before == --* && $before != *=* && $value != -* ]]; then
    flag="$before"
  fi
  case "$flag" in
@CASES@
    --model) words="$(@PYTHON@ -P -m lingvo_gpipe.cli.completion "$line" 2> /dev/null)" ;;
    @FILES@)
      COMPREPLY=()
      for word in "$value"*; do  # As they are: `compgen -W` would expand their names.
        [[ -d $word ]] && word+=/
        [[ -e $word ]] && COMPREPLY+=("$prefix$(printf %q "$word")")
      done
      [[ ${COMPREPLY[0]} == */ ]] || compopt +o nospace 2> /dev/null
      return ;;
  esac
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "$value"))
  [[ ${COMPREPLY[0]} == *[=/] ]] || compopt +o nospace 2> /dev/null
}
complete -o nospace -F _@PROGRAM@_completion @PROGRAM@
"""

_START_OF_ZSH = """autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit
bashcompinit
"""


def Script(shell: str, program: str, values: flags.FlagValues, names: Collection[str]) -> str:
  """Returns a script that completes the flags of a program.

  Args:
    shell: one of `SHELLS`.
    program: the name of the program.
    values: the flags, by name.
    names: the names of the flags to complete.
  """
  switches = [f'--{name}' for name in sorted(names) if values[name].boolean]
  with_values = [f'--{name}' for name in sorted(names) if not values[name].boolean]
  # The words after a flag; after a switch or a value the next flag follows.
  words = {'|'.join(["''", *switches]): [*switches, *(f'{flag}=' for flag in with_values)]}
  for name in sorted(names):
    if choices := getattr(values[name].parser, 'enum_values', None) or _VALUES.get(name):
      words[f'--{name}'] = choices
  replacements = {
    'PROGRAM': program,
    'CASES': '\n'.join(f"    {case}) words='{' '.join(words[case])}' ;;" for case in words),
    'PYTHON': shlex.quote(sys.executable),
    'FILES': '|'.join(f'--{name}' for name in _FILES),
  }
  script = re.sub('@([A-Z]+)@', lambda match: replacements[match[1]], _SCRIPT)
  return (_START_OF_ZSH if shell == 'zsh' else '') + script


def _PrintKeys(line: str) -> None:
  """Prints the keys of experiments, also of the packages that a command line names."""
  packages = re.findall(r'--params_package[= ](\S+)', line)
  print('\n'.join(registry.ListKeys(['params', *packages])))


if __name__ == '__main__':
  sys.path.insert(0, '')  # Only now: the imports could load a file of the working directory.
  _PrintKeys(sys.argv[1])
