"""Reading a Triton config.pbtxt."""

from __future__ import annotations

import pytest

from windtunnel.sim.deployment.triton_config import PbtxtError, from_pbtxt
from windtunnel.sim.engine.batch_queue import QueuePolicy
from windtunnel.sim.engine.dynamic import DynamicConfig

FULL = """
# Everything that matters, and some that does not.
name: "gpt"
backend: 'python'; max_batch_size: 16
input [ { name: "ids" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "lengths" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_GPU } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  preserve_ordering: true
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5000 allow_timeout_override: true }
  priority_queue_policy { key: 1 value: < max_queue_size: 0x10 > }
}
parameters: { key: "a" value: { string_value: "x" "y" } }
"""


def test_the_settings_of_the_batcher_are_read_and_all_else_is_listed() -> None:
    imported = from_pbtxt(FULL)
    assert imported.config == DynamicConfig(
        max_batch_size=16,
        preferred_batch_size=(4, 8),
        max_queue_delay_microseconds=100,
        default_queue_policy=QueuePolicy(0, 5000, "DELAY"),
        priority_levels=3,
        default_priority_level=2,
        priority_queue_policy=((1, QueuePolicy(16)),),
        instance_count=2,
    )
    assert imported.ignored == (
        "line 3: name",
        "line 4: backend",
        "line 5: input",
        "line 6: instance_group.kind",
        "line 10: dynamic_batching.preserve_ordering",
        "line 13: dynamic_batching.default_queue_policy.allow_timeout_override",
        "line 16: parameters",
    )


def test_an_empty_dynamic_batching_takes_what_is_there() -> None:
    assert from_pbtxt("max_batch_size: 8 dynamic_batching { }") == (DynamicConfig(8), ())
    assert from_pbtxt("max_batch_size: 8 dynamic_batching {} instance_group {count: 1} instance_group {}") == (
        DynamicConfig(8, instance_count=2),
        (),
    )


def test_repeated_values_may_be_given_one_by_one() -> None:
    text = "max_batch_size: 8 dynamic_batching: { preferred_batch_size: 2, preferred_batch_size: 4 }"
    assert from_pbtxt(text).config.preferred_batch_size == (2, 4)


@pytest.mark.parametrize("text", ["max_batch_size: 8", "dynamic_batching { }", ""])
def test_without_a_batcher_or_a_batch_dimension_requests_run_one_by_one(text: str) -> None:
    config, ignored = from_pbtxt(text)
    assert config == DynamicConfig(1)
    assert "requests run one by one" in ignored[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size 8", "line 1: expected ':' or '{', found '8'"),
        ("name: 'a'\nmax_batch_size: \"8\"", "line 2: max_batch_size must be a whole number, found '\"8\"'"),
        ("max_batch_size: 4.5", "line 1: max_batch_size must be a whole number, found '4.5'"),
        ("dynamic_batching {\n preferred_batch_size: [ 4 8 ] }", "line 2: expected ',' or ']', found '8'"),
        ("a {\n b: 1\n", "line 3: expected a field's name or '}', found 'the end of the file'"),
        ("a: 1 }", "line 1: expected a field's name, found '}'"),
        ("a < b: 1 }", "line 1: expected a field's name or '>', found '}'"),
        ("a:\n", "line 2: expected a value, found 'the end of the file'"),
        ("x: 1\ny: $", "line 2: cannot read '$'"),
        ('x: "open\n', "line 1: cannot read '\"open'"),
        ("max_batch_size: 1\nmax_batch_size: 2", "line 2: max_batch_size is given twice"),
        ("dynamic_batching: 3", "line 1: dynamic_batching must be a message in braces, found '3'"),
        ("max_batch_size: {}", "line 1: max_batch_size must be a whole number, found 'a message'"),
        (
            "max_batch_size: 4\ndynamic_batching { preferred_batch_size: 8 }",
            "line 2: dynamic_batching: preferred_batch_size must lie between 1 and max_batch_size (4), got 8",
        ),
        (
            "max_batch_size: 4 dynamic_batching {\n default_queue_policy { timeout_action: DROP } }",
            "line 2: default_queue_policy: timeout_action must be one of REJECT, DELAY, got 'DROP'",
        ),
        ("max_batch_sise: 32", "line 1: unknown field 'max_batch_sise' of a model; did you mean 'max_batch_size'?"),
        (
            "max_batch_size: 4\ndynamic_batching {\n max_queue_delay: 100 }",
            "line 3: unknown field 'max_queue_delay' of dynamic_batching; did you mean 'max_queue_delay_microseconds'?",
        ),
        ("\nsequence_batching { }", "line 2: sequence_batching is not simulated: import models with dynamic_batching"),
    ],
)
def test_a_mistake_names_its_line(text: str, message: str) -> None:
    with pytest.raises(PbtxtError) as error:
        from_pbtxt(text)
    assert str(error.value) == message


def test_in_flight_batching_of_tensorrt_llm_is_told_to_be_another_policy() -> None:
    text = 'max_batch_size: 8\nparameters { key: "gpt_model_type" value { string_value: "inflight_fused_batching" } }'
    assert any("--batching continuous" in note for note in from_pbtxt(text).ignored)
