# SPDX-License-Identifier: Apache-2.0
"""Settings and strategies of the fuzz tests.

    FUZZ_EXAMPLES=20000 make test ARGS='tests/fuzz_text_test.py tests/fuzz_files_test.py'

tries more examples, and different ones in each run. By default each run tries the same few hundred
examples of each kind.
"""

import os

import hypothesis
from hypothesis import strategies as st

_LONG = os.environ.get('FUZZ_EXAMPLES')


def Settings(share=1.0):
  """Returns the settings of a test that runs only this share of the examples."""
  number = int(_LONG) if _LONG else 400
  return hypothesis.settings(
    max_examples=max(10, int(number * share)),
    deadline=None,
    derandomize=not _LONG,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )


@st.composite
def NearlyRight(draw, samples, fragments, any_part):
  """Draws one of the samples with parts removed, repeated, moved or replaced.

  Args:
    draw: Hypothesis's draw function.
    samples: valid texts or bytes.
    fragments: parts with a meaning to the reader under test.
    any_part: a strategy for other parts.
  """
  text = draw(st.sampled_from(samples))
  for _ in range(draw(st.integers(1, 4))):
    begin = draw(st.integers(0, len(text)))
    end = draw(st.integers(begin, min(len(text), begin + draw(st.sampled_from([0, 1, 3, 1000])))))
    other = draw(st.sampled_from(samples))
    cut = draw(st.integers(0, len(other)))
    part = draw(st.one_of(st.sampled_from(fragments), any_part, st.just(other[cut : cut + 20])))
    times = 1 if len(part) > 3 else draw(st.sampled_from([1, 1, 1, 2, 300]))
    text = text[:begin] + part * times + text[end:]
  return text
