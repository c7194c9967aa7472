"""Scenario files: what they accept, and what they say about what they do not."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import REPO_ROOT

from windtunnel.cli.simulate import simulate
from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
from windtunnel.scenarios.flags import WITHOUT_FLAG, flag_of
from windtunnel.scenarios.json_schema import json_schema
from windtunnel.scenarios.load import Loaded, Override, bundled_scenarios, load_scenario, override_path
from windtunnel.scenarios.resolve import read_workload
from windtunnel.scenarios.schema import SECTIONS, Scenario
from windtunnel.scenarios.workloads import FORMATS
from windtunnel.scenarios.workloads.timeunit import TimeUnit
from windtunnel.sim.deployment.kv_dtypes import PLANNED
from windtunnel.sim.deployment.model_spec import DTYPE_BYTES

WORKLOAD = "[workload]\nnum_requests = 10\ninput = 100\noutput = 10\n"


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str, **overrides: Any) -> Loaded:
    """Load ``text`` as scenario.toml of the working folder, with overrides as flags."""
    Path("scenario.toml").write_text(text, "utf-8")
    flags = {key: Override(value, "--" + key.replace("_", "-")) for key, value in overrides.items()}
    return load_scenario("scenario.toml", flags)


def complaint(text: str, **overrides: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(text, **overrides)
    return str(caught.value)


def test_an_unknown_key_names_the_nearest_one_with_file_and_line(in_tmp: Path) -> None:
    text = WORKLOAD + "\n[engine]  # knobs\nblock_size = 16\nmax_num_seq = 64\n"
    assert complaint(text) == "scenario.toml:8: unknown key 'max_num_seq' in [engine]; did you mean 'max_num_seqs'?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nmodel = 'x'\n", ":6: unknown key 'model' in [engine]; it belongs in [deployment]"),
        ("[egnine]\nblock_size = 16\n", ":5: unknown key 'egnine'; did you mean 'engine'?"),
        ("start = 5\n", ":5: unknown key 'start' in [workload]; it needs a trace"),
        ("[engine]\nmax_num_seqs = 0\n", ":6: max_num_seqs = 0 in [engine] must be at least 1"),
        ("[engine]\nwatermark = 1.5\n", ":6: watermark = 1.5 in [engine] must be at least 0 and below 1"),
        ("[engine]\nmax_num_seqs = 1.5\n", ":6: max_num_seqs = 1.5 in [engine] must be a whole number such as 8192"),
        ("[engine]\nmax_num_seqs = true\n", ":6: max_num_seqs = true in [engine] must be a whole number"),
        (
            "[engine]\nenable_prefix_caching = 'on'\n",
            ":6: enable_prefix_caching = 'on' in [engine] must be true or false",
        ),
        (
            "[engine]\nscheduling_policy = 'lifo'\n",
            ":6: scheduling_policy = 'lifo' in [engine] must be one of 'fcfs' or",
        ),
        ("[run]\nhorizon = 'soon'\n", ":6: horizon = 'soon' in [run] must be a duration"),
        ("[deployment]\nkv_cache_memory_bytes = '16 gb'\n", "16GiB is 16 * 2**30 bytes, 16GB is 16 * 10**9 bytes"),
        ("[deployment]\ngpu_memory_utilization = 92\n", "must be above 0 and at most 1"),
        ("[cost]\nkind = 'guess'\n", ":6: kind = 'guess' in [cost] must be one of 'auto', 'roofline', 'constant'"),
        ("[cost]\nkind = 'constant'\n", ":5: missing 'step_s' in [cost]"),
        ("[cost]\nstep_s = '10ms'\n", ":6: unknown key 'step_s' in [cost]; it needs kind = 'constant'"),
        ("[run]\npercentiles = [50, 250]\n", ":6: percentiles[1] = 250 in [run] must be below 100"),
        ("[slo]\nobjectives = 'ttft:p99<1s'\n", ":6: objectives = 'ttft:p99<1s' in [slo] must be a list"),
    ],
)
def test_what_is_wrong_is_named_with_line_key_value_and_range(in_tmp: Path, text: str, expected: str) -> None:
    assert expected in complaint(WORKLOAD + text)


def test_a_key_that_needs_another_workload_says_so(in_tmp: Path) -> None:
    assert "a trace brings its own lengths and arrivals" in complaint("[workload]\ntrace = 'a.csv'\nnum_requests = 4\n")


def test_all_complaints_come_at_once_in_the_order_of_the_file(in_tmp: Path) -> None:
    text = WORKLOAD + "[engine]\nblock_size = 0\nmax_num_seqz = 1\nwatermark = 2\n"
    lines = complaint(text).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["scenario.toml:6", "scenario.toml:7", "scenario.toml:8"]


def test_a_scenario_without_a_workload_says_how_to_give_one(in_tmp: Path) -> None:
    said = complaint("[engine]\nblock_size = 16\n")
    assert "give a trace (--trace), or num_requests, input and output (--num-prompts, " in said


def test_text_that_is_no_toml_names_its_line(in_tmp: Path) -> None:
    assert complaint("name = 'a'\nx = = 3\n").startswith("scenario.toml:2: not valid TOML: ")


def test_a_scenario_of_another_version_is_refused(in_tmp: Path) -> None:
    assert complaint("schema_version = 2\n" + WORKLOAD) == "scenario.toml:1: schema_version = 2 must be 1"


def test_a_missing_file_names_the_nearest_bundled_scenario() -> None:
    with pytest.raises(ScenarioUnreadable, match="did you mean 'chat-8b-h100'"):
        load_scenario("chat-8b-h10")


def test_a_folder_or_binary_file_cannot_be_read(in_tmp: Path) -> None:
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in (".", "binary.toml"):
        with pytest.raises(ScenarioUnreadable, match="cannot read scenario"):
            load_scenario(name)


def test_numbers_are_read_with_their_units(in_tmp: Path) -> None:
    text = """
    [deployment]
    kv_cache_memory_bytes = "16GiB"
    [engine]
    max_num_batched_tokens = "16k"
    max_model_len = "8K"
    [workload]
    trace = "a.csv"
    start = "20m"
    duration = 90
    """
    scenario = load(text).scenario
    assert scenario.deployment.kv_cache_memory_bytes == 16 * 2**30
    assert (scenario.engine.max_num_batched_tokens, scenario.engine.max_model_len) == (16_000, 8192)
    assert (scenario.workload.start, scenario.workload.duration) == (1200.0, 90.0)  # type: ignore[union-attr]


def test_a_distribution_may_be_written_as_text(in_tmp: Path) -> None:
    as_text = load("[workload]\ninput = 'lognormal:mean=512,sigma=0.8'\noutput = '1k'\n").scenario
    as_table = load("[workload]\noutput = 1000\ninput = {dist = 'lognormal', mean = 512, sigma = 0.8}\n").scenario
    assert as_table == as_text


def test_each_value_knows_who_gave_it(in_tmp: Path) -> None:
    loaded = load(WORKLOAD + "[engine]\nblock_size = 32\nmax_num_seqs = 8\n", max_num_seqs="16")
    assert loaded.source_of("engine", "block_size") == "scenario.toml:6"
    assert loaded.source_of("engine", "max_num_seqs") == "--max-num-seqs"
    assert loaded.source_of("engine", "watermark") is None
    assert loaded.scenario.engine.max_num_seqs == 16


def test_a_wrong_flag_is_named_instead_of_the_line_that_it_overrides(in_tmp: Path) -> None:
    text = WORKLOAD + "[engine]\nmax_num_seqs = 8\n"
    assert "--max-num-seqs: max_num_seqs = 'x' in [engine] must be a whole number" in complaint(text, max_num_seqs="x")


def test_a_trace_from_a_flag_replaces_the_workload_of_the_file(in_tmp: Path) -> None:
    loaded = load(WORKLOAD, trace="b.csv")
    assert loaded.scenario.workload.trace == "b.csv"  # type: ignore[union-attr]
    assert loaded.notes == ("--trace replaces the scenario's own workload",)


def test_a_rate_from_a_flag_replaces_the_arrival_process_of_the_file(in_tmp: Path) -> None:
    text = WORKLOAD + "arrival = {process = 'poisson', rate = 3}\n"
    loaded = load(text, request_rate="5")
    assert loaded.scenario.workload.request_rate == 5  # type: ignore[union-attr]
    assert loaded.scenario.workload.arrival is None  # type: ignore[union-attr]
    assert loaded.notes == ("--request-rate replaces the scenario's own arrival",)
    back = load(WORKLOAD + "request_rate = 3\nburstiness = 0.5\n", arrival="poisson:rate=5")
    assert back.scenario.workload.arrival == {"process": "poisson", "rate": 5}  # type: ignore[union-attr]
    assert len(back.notes) == 2


def test_paths_of_the_file_are_relative_to_it_and_those_of_flags_to_the_working_folder(in_tmp: Path) -> None:
    Path("sub").mkdir()
    Path("sub/s.toml").write_text("[workload]\ntrace = 'a.csv'\n")
    from_file = load_scenario("sub/s.toml")
    from_flag = load_scenario("sub/s.toml", {"trace": Override("b.csv", "--trace")})
    assert Path("sub/a.csv") == from_file.path_of("workload", "trace", "a.csv")
    assert Path("b.csv") == from_flag.path_of("workload", "trace", "b.csv")


def test_a_section_can_be_overridden_whole(in_tmp: Path) -> None:
    loaded = load(WORKLOAD + "[cost]\nkind = 'affine'\nbase_s = 1\n", cost="constant:step_s=10ms")
    assert loaded.scenario.cost.model_dump() == {"kind": "constant", "step_s": 0.01}
    assert loaded.source_of("cost", "step_s") == "--cost"


def test_an_unknown_override_names_the_nearest_setting() -> None:
    with pytest.raises(ScenarioError, match="unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        override_path("max_num_seq")


def test_a_dict_and_a_scenario_load_like_a_file(in_tmp: Path) -> None:
    table = {"name": "scenario", "workload": {"num_requests": 10, "input": 100, "output": 10}}
    from_file = load(WORKLOAD).scenario
    assert from_file == load_scenario(table).scenario
    assert from_file == load_scenario(from_file).scenario
    assert table["workload"] == {"num_requests": 10, "input": 100, "output": 10}, "the caller's dict is left alone"


def test_no_key_of_two_sections_has_the_same_name() -> None:
    home: dict[str, str] = {}
    for section, models in SECTIONS.items():
        for key in {key for model in models for key in model.model_fields}:
            assert section == home.setdefault(key, section), f"{key} is in [{home[key]}] and [{section}]"


def test_every_bundled_scenario_loads_and_says_in_one_line_what_it_is() -> None:
    names = bundled_scenarios()
    assert "chat-8b-h100" in names
    for name, description in names.items():
        scenario = load_scenario(name).scenario
        assert name == scenario.name
        assert description == scenario.description.strip()
        assert 20 <= len(description) <= 120


def test_the_json_schema_describes_every_key_and_its_range() -> None:
    schema = json_schema()
    json.dumps(schema, allow_nan=False)
    assert set(Scenario.model_fields) == set(schema["properties"])
    engine = schema["$defs"]["Engine"]
    assert engine["additionalProperties"] is False
    for name, item in engine["properties"].items():
        assert item["description"], name
    watermark = engine["properties"]["watermark"]
    assert (watermark["type"], watermark["minimum"], watermark["exclusiveMaximum"]) == ("number", 0, 1)
    assert '"ge"' not in json.dumps(schema)


def tables_of(node: Any) -> list[dict[str, Any]]:
    """Every table with keys in a schema."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node] if isinstance(node, dict) and isinstance(node.get("properties"), dict) else []
    return own + [table for item in inner for table in tables_of(item)]


def test_every_key_down_to_the_last_table_has_a_type_and_a_meaning() -> None:
    tables = tables_of(json_schema())
    tables = [table for table in tables if table.get("type") == "object"]
    assert len(tables) > 25
    for table in tables:
        assert table["additionalProperties"] is False
        for key, item in (*table["properties"].items(), *table.get("patternProperties", {}).items()):
            is_tag = key in ("dist", "process") and "const" in item
            is_section = "$ref" in item or "oneOf" in item or "anyOf" in item
            assert is_tag or is_section or {"type", "enum", "const"} & set(item), key
            assert is_tag or is_section or item["description"].endswith((".", "exactly.")), key
    keys = {key for table in tables for key in table["properties"]}
    assert {"popularity", "exponent", "share", "std", "gemm_flops", "range_ratio", "think", "on_s"} <= keys


def fits(value: Any, rule: dict[str, Any], defs: dict[str, Any]) -> bool:
    """Whether a value keeps the part of JSON Schema that ours uses."""
    if "$ref" in rule:
        return fits(value, defs[rule["$ref"].rpartition("/")[2]], defs)
    for word, enough in (("anyOf", 1), ("oneOf", 1)):
        if word in rule and sum(fits(value, one, defs) for one in rule[word]) < enough:
            return False
    types = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "object": dict, "array": list}
    named = [rule["type"]] if isinstance(rule.get("type"), str) else rule.get("type", [])
    is_bool = isinstance(value, bool)
    if named and not any(isinstance(value, types[name]) and is_bool == (name == "boolean") for name in named):
        return False
    if "const" in rule and value != rule["const"]:
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    if isinstance(value, (int, float)) and not is_bool:
        bounds = (("minimum", ge), ("exclusiveMinimum", gt), ("maximum", le), ("exclusiveMaximum", lt))
        return all(holds(value, rule[word]) for word, holds in bounds if word in rule)
    if isinstance(value, list):
        return all(fits(item, rule.get("items", {}), defs) for item in value)
    return not isinstance(value, dict) or "properties" not in rule or fits_table(value, rule, defs)


def fits_table(table: dict[str, Any], rule: dict[str, Any], defs: dict[str, Any]) -> bool:
    rules = {key: rule["properties"].get(key) for key in table}
    for pattern, other in rule.get("patternProperties", {}).items():
        rules |= {key: other for key in table if re.search(pattern, key)}
    whole = all(key in table for key in rule.get("required", ()))
    return whole and all(rules[key] is not None and fits(value, rules[key], defs) for key, value in table.items())


BASE: dict[str, Any] = {"name": "x", "workload": {"num_requests": 10, "input": 100, "output": 10}}
CHANGES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"input": {"dist": "lognormal", "mean": 5, "std": 3}}, True),
    ({"input": {"dist": "lognormal", "mean": 5, "stdd": 3}}, False),
    ({"input": {"dist": "lognormal", "mean": 0, "std": 3}}, False),
    ({"input": {"dist": "lognorm", "mean": 5, "std": 3}}, False),
    ({"input": {"dist": "lognormal", "std": 3}}, False),
    ({"input": {"dist": "quantiles", "p50": 5, "p99.9": 30}}, True),
    ({"input": {"dist": "quantiles", "q50": 5}}, False),
    ({"input": {"dist": "quantiles", "quantiles": [[0.5, 200], [1.0, 1500]]}}, True),
    ({"input": {"dist": "uniform", "tokens": 5, "range_ratio": 1}}, False),
    ({"input": {"dist": "empirical", "values": [1, 2]}}, True),
    ({"input": {"dist": "empirical", "values": [1, 0]}}, False),
    ({"input": 0}, False),
    ({"arrival": {"process": "on_off", "rate": 5, "on_s": "10s", "off_s": 3}}, True),
    ({"arrival": {"process": "on_off", "rate": 5, "on_s": 0, "off_s": 3}}, False),
    ({"arrival": {"process": "ramp", "start_rate": 5, "end_rate": 6, "strategy": "cubic"}}, False),
    ({"prefixes": {"num_prefixes": 3, "prefix_tokens": 50, "popularity": "zipf", "exponent": 1.2, "share": 0.5}}, True),
    ({"prefixes": {"num_prefixes": 3, "prefix_tokens": {"dist": "geometric", "mean": 5}}}, True),
    ({"prefixes": {"num_prefixes": 3, "prefix_tokens": {"dist": "geometric", "mean": 0.5}}}, False),
    ({"prefixes": {"num_prefixes": 3, "prefix_tokens": 50, "popularity": "normal"}}, False),
    ({"prefixes": {"num_prefixes": 3, "prefix_tokens": 50, "share": 1.5}}, False),
    ({"prefixes": {"prefix_tokens": 50}}, False),
    ({"sessions": {"turns": 3, "think": {"dist": "exponential", "mean_s": "20s"}}}, True),
    ({"sessions": {"turns": 3, "think": -1}}, False),
    ({"sessions": {"turns": 3, "pause": 1}}, False),
    ({"num_requests": 0}, False),
    ({"num_request": 5}, False),
    ({"burstiness": 0}, False),
]


@pytest.mark.parametrize(("changes", "valid"), CHANGES)
def test_the_json_schema_accepts_what_the_program_accepts_and_refuses_the_rest(
    changes: dict[str, Any], valid: bool
) -> None:
    scenario = {**BASE, "workload": {**BASE["workload"], **changes}}
    schema = json_schema()
    assert fits(scenario, schema, schema["$defs"]) is valid
    if valid:
        assert len(read_workload(load_scenario(scenario))) == 10
    else:
        with pytest.raises(ScenarioError):
            read_workload(load_scenario(scenario))


@pytest.mark.parametrize(
    ("cost", "valid"),
    [
        ({"kind": "constant", "step_s": "10ms"}, True),
        ("constant:step_s=10ms", True),
        ({"kind": "constant", "step_s": 0}, False),
        ({"gemm_flops": 0.5, "host_s": "2ms"}, True),
        ({"gemm_flops": 1.5}, False),
        ({"gemm_flop": 0.5}, False),
        ({"kind": "affine", "base_s": 0.01, "token_s": "20us"}, True),
        ({"kind": "guess"}, False),
    ],
)
def test_the_json_schema_knows_every_cost_model(cost: Any, valid: bool) -> None:
    schema = json_schema()
    assert fits({**BASE, "cost": cost}, schema, schema["$defs"]) is valid
    if valid:
        load_scenario({**BASE, "cost": cost})
    else:
        with pytest.raises(ScenarioError):
            load_scenario({**BASE, "cost": cost})


def test_bundled_scenarios_keep_the_json_schema() -> None:
    schema = json_schema()
    for path in sorted((REPO_ROOT / "scenarios" / "data").glob("*.toml")):
        assert fits(tomllib.loads(path.read_text()), schema, schema["$defs"]), path.name


def test_the_choices_of_a_scenario_are_those_of_what_reads_them() -> None:
    keys = {
        key: field.annotation
        for models in SECTIONS.values()
        for model in models
        for key, field in model.model_fields.items()
    }
    assert set(get_args(keys["format"])) == {"auto", *FORMATS}
    assert set(get_args(keys["time_unit"])) == {"auto", *get_args(TimeUnit)}
    kv_types = next(kind for kind in get_args(keys["kv_cache_dtype"]) if get_args(kind))
    assert set(get_args(kv_types)) == set(PLANNED)
    dtypes = next(kind for kind in get_args(keys["dtype"]) if get_args(kind))
    assert set(get_args(dtypes)) == {"auto", "half", "float", *DTYPE_BYTES}


def test_every_key_has_its_flag_or_is_known_to_have_none() -> None:
    flags = set(inspect.signature(simulate).parameters)
    for section, models in {**SECTIONS, "scenario": (Scenario,)}.items():
        for key in {key for model in models for key in model.model_fields} - set(SECTIONS):
            flag = flag_of(key, section)
            is_whole = section in {"cost", "batching", "speculative", "compare", "plan"}  # one flag gives it, or none
            is_whole = is_whole and (section, key) != ("cost", "noise")
            assert (flag != "") == (key not in WITHOUT_FLAG and not is_whole), key
            assert flag == "" or flag.removeprefix("--").replace("-", "_") in flags, flag


def test_a_key_under_the_name_of_its_flag_says_how_it_is_called(in_tmp: Path) -> None:
    said = complaint("[workload]\nnum_prompts = 5\ninput_len = 3\noutput = 5\n")
    assert "unknown key 'num_prompts' in [workload]; it is called 'num_requests' here" in said
    assert "unknown key 'input_len' in [workload]; it is called 'input' here" in said
    assert "it is called 'block_size' here" in complaint(WORKLOAD + "[engine]\nblock-size = 16\n")


def test_what_is_missing_names_its_flag(in_tmp: Path) -> None:
    said = complaint("[workload]\nrequest_rate = 10\n")
    assert "missing 'input' in [workload]: give --input-len or input under [workload], or a trace (--trace)" in said
    assert "missing 'output' in [workload]: give --output-len " in said


def test_the_beginning_of_a_name_is_enough_to_be_understood() -> None:
    for given in ("chat", "chat-8b", "closed"):
        with pytest.raises(ScenarioUnreadable, match=f"did you mean '{given}"):
            load_scenario(given)
    with pytest.raises(ScenarioUnreadable, match="bundled are agent-sessions, "):
        load_scenario("nothing-like-it")


def test_objectives_that_are_replaced_are_told(in_tmp: Path) -> None:
    text = WORKLOAD + "[slo]\nobjectives = ['ttft:p99<1s', 'itl:p99<9ms']\ngoodput = ['ttft:500']\n"
    assert load(text, objectives=["e2el:p99<1s"]).notes == (
        "--objectives replaces the scenario's own objectives: ttft:p99<1s, itl:p99<9ms",
    )
    assert load(text, goodput=["tpot:5"]).notes == ("--goodput replaces the scenario's own goodput: ttft:500",)
    assert load(text, goodput=["ttft:500"]).notes == ()
    assert load(text).notes == ()
