"""What prices a scenario's steps: the default, profiles that are named, and what every output says of their error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bundle import COMPOSED, GPU, MODEL, RESTS_ON, bundle, fitted

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
from windtunnel.scenarios.load import Override, load_scenario
from windtunnel.scenarios.resolve import Resolved, resolve
from windtunnel.sim.cost.bundled import bundled_profiles
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.cost.fitted import FittedCost, OutsideDomain
from windtunnel.sim.cost.profile import save_profile
from windtunnel.sim.cost.roofline import RooflineCost
from windtunnel.sim.engine.plan import StepShape

NAME = "llama-h100"
SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h100",
    "num_requests": 20,
    "input": 100,
    "output": 8,
    "request_rate": 20,
    "saturation": False,
}
FLAGS = (
    *("--model", "llama-3.1-8b", "--gpu", "h100", "--num-prompts", "20", "--input-len", "100", "--output-len", "8"),
    *("--request-rate", "20", "--no-saturation"),
)


def resolved(**settings: Any) -> Resolved:
    given = {key: value for key, value in {**SMALL, **settings}.items() if value is not None}
    return resolve(load_scenario(None, {key: Override(value, f"{key}=") for key, value in given.items()}))


def told(answer: Resolved) -> str:
    return "\n".join((*answer.notes, *answer.warnings))


def chosen(answer: Resolved) -> tuple[Any, str]:
    found = next(entry for entry in answer.entries if entry.key == "cost_model")
    return found.value, found.source


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FittedCost:
    """The only bundled profile, NAME: of MODEL on one GPU."""
    monkeypatch.chdir(tmp_path)
    cost = fitted()
    bundle(tmp_path, monkeypatch, [(NAME, cost)])
    return cost


def saved(cost: Any, name: str = "mine.json") -> str:
    save_profile(cost, name)
    return name


# -- the default


def test_the_default_is_the_bundled_profile_of_that_deployment(profile: FittedCost) -> None:
    answer = resolved()
    assert isinstance(answer.cost, FittedCost)
    assert answer.cost.parameters == profile.parameters
    value, source = chosen(answer)
    assert value == f"profile {NAME}"
    assert source == f"bundled for {MODEL} on {GPU}, tensor_parallel_size 1, bfloat16"
    assert f"Step times come from the profile {NAME}: {COMPOSED}" in told(answer)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gpu": "l40s"}, "L40S, tensor_parallel_size 1, bfloat16; there is one on H100-SXM"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2, bfloat16; there is one for tensor_parallel_size 1"),
        ({"dtype": "float16"}, "tensor_parallel_size 1, float16; there is one for dtype bfloat16 ("),
        ({"kv_cache_dtype": "fp8"}, "bfloat16, kv_cache_dtype fp8; there is one for kv_cache_dtype auto ("),
        ({"model": "qwen2.5-7b"}, "on H100-SXM, tensor_parallel_size 1, bfloat16 (windtunnel profiles list)"),
    ],
)
def test_without_a_profile_the_default_is_the_roofline_and_says_why(
    profile: FittedCost, settings: dict[str, Any], reason: str
) -> None:
    answer = resolved(**settings)
    assert isinstance(answer.cost, RooflineCost)
    assert chosen(answer)[0] == "roofline"
    assert "from the roofline, uncalibrated: no bundled profile for" in told(answer)
    assert reason in told(answer)


def test_the_cache_in_the_models_own_type_is_no_other_case(profile: FittedCost) -> None:
    assert isinstance(resolved(kv_cache_dtype="bfloat16").cost, FittedCost)


def test_a_config_json_of_the_same_shapes_gets_the_profile_and_one_of_others_does_not(
    profile: FittedCost, tmp_path: Path
) -> None:
    from windtunnel.sim.deployment.model import read_model_config

    config, _ = read_model_config(MODEL)
    for name, changes in OF_ONE_NAME.items():
        folder = tmp_path / name / "llama-3.1-8b-instruct"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
    assert isinstance(resolved(model=str(tmp_path / "tuned" / "llama-3.1-8b-instruct")).cost, FittedCost)
    for name in ("pruned", "quantised"):
        assert isinstance(resolved(model=str(tmp_path / name / "llama-3.1-8b-instruct")).cost, RooflineCost)


OF_ONE_NAME: dict[str, dict[str, Any]] = {
    "tuned": {"max_position_embeddings": 8192},
    "pruned": {"num_hidden_layers": 30},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
}


def own_model(folder: Path, **changes: Any) -> str:
    """A folder under the name of a bundled model, with a config.json of other numbers; its name."""
    from windtunnel.sim.deployment.model import read_model_config

    (folder / "Llama-3.1-8B-Instruct").mkdir(parents=True)
    config, _ = read_model_config(MODEL)
    (folder / "Llama-3.1-8B-Instruct" / "config.json").write_text(json.dumps({**config, **changes}))
    return "Llama-3.1-8B-Instruct"


def test_a_model_given_as_a_path_is_that_one_even_under_a_bundled_name(
    profile: FittedCost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = own_model(tmp_path, num_hidden_layers=4)
    for given in (f"./{name}", f"./{name}/config.json", f"../{tmp_path.name}/{name}", str(tmp_path / name)):
        answer = resolved(model=given)
        assert answer.model is not None
        assert answer.model.num_layers == 4, given
        assert isinstance(answer.cost, RooflineCost)
    monkeypatch.chdir("/")
    (tmp_path / "mine.toml").write_text(f'[deployment]\nmodel = "./{name}"\ngpu = "h100"\n')
    own = {key: Override(value, key) for key, value in SMALL.items() if key not in ("model", "gpu")}
    from_file = resolve(load_scenario(tmp_path / "mine.toml", own))
    assert from_file.model is not None
    assert from_file.model.num_layers == 4


def test_a_bundled_name_is_the_bundled_model_and_a_folder_of_that_name_is_told_of(
    profile: FittedCost, tmp_path: Path
) -> None:
    name = own_model(tmp_path, num_hidden_layers=4)
    answer = resolved(model=name)
    assert answer.model is not None
    assert answer.model.num_layers == 32
    assert f"Model {name} is the bundled one; {name}, which is called so too, is not read: write ./{name}" in told(
        answer
    )
    assert "is not read" not in told(resolved(model=f"./{name}"))


def test_a_drafter_given_as_a_path_is_that_one_even_under_a_bundled_name(profile: FittedCost, tmp_path: Path) -> None:
    name = own_model(tmp_path, num_hidden_layers=2)
    drafts = {"method": "draft_model", "num_speculative_tokens": 2, "acceptance": 0.7}
    decode = StepShape(8, 8000, 0, 0, 0, 0, 8)
    times_s = {}
    for given in (name, f"./{name}"):
        drafting = resolved(speculative={**drafts, "draft_model": given}).system.drafting
        assert drafting is not None
        assert drafting.cost is not None
        times_s[given] = drafting.cost.time_s(decode)
    assert times_s[f"./{name}"] < 0.5 * times_s[name], "two layers cost less than 32"


@pytest.mark.parametrize(
    ("cost", "kind"),
    [
        ("roofline", RooflineCost),
        ({"host_s": "1ms"}, RooflineCost),
        ({"kind": "roofline", "gemm_flops": 0.5}, RooflineCost),
        ("constant:step_s=10ms", ConstantCost),
        ("auto", FittedCost),
        ({}, FittedCost),
        ({"refuse_outside": True}, FittedCost),
    ],
)
def test_what_is_asked_for_wins_over_the_default(profile: FittedCost, cost: Any, kind: type) -> None:
    assert isinstance(resolved(cost=cost).cost, kind)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"batching": {"policy": "static", "batch_size": 4}},
        {"batching": {"policy": "dynamic", "max_batch_size": 4}},
        {"batching": {"policy": "swap"}},
        {"speculative": "eagle3:num_speculative_tokens=2,acceptance=0.7"},
        {"speculative": "ngram:num_speculative_tokens=2,acceptance=0.7"},
    ],
)
@pytest.mark.parametrize("noise", [False, True])
def test_every_policy_runs_on_a_profile(profile: FittedCost, settings: dict[str, Any], noise: bool) -> None:
    runs = [wt.simulate(None, **SMALL, **settings, noise=noise) for _ in range(2)]
    assert runs[0].summary["completed"] == 20
    assert runs[0].summary["cost_model_profile"] == NAME
    assert runs[0].summary == runs[1].summary


def test_drafting_costs_time_beside_a_profile_too(profile: FittedCost) -> None:
    drafts = "eagle3:num_speculative_tokens=2,acceptance=0.7"
    answer = resolved(speculative=drafts)
    assert answer.system.drafting is not None
    assert answer.system.drafting.cost is not None
    assert "What drafting costs comes from the roofline" in told(answer)
    free = resolved(speculative=f"{drafts},draft_s=0")
    assert "What drafting costs" not in told(free)


def test_every_bundled_profile_is_the_default_of_its_own_deployment() -> None:
    known = [each for each in bundled_profiles() if each.gpu is not None]
    for each in known:
        settings = {"model": each.model, "gpu": each.gpu, "tensor_parallel_size": each.tensor_parallel_size}
        settings |= {"dtype": each.dtype, "kv_cache_dtype": each.kv_cache_dtype, "max_model_len": 4096}
        answer = resolved(**settings)
        assert chosen(answer)[0] == f"profile {each.name}"
        assert answer.warnings == ()
        assert resolved(**settings, profile=each.name).warnings == (), "nor by its name"
        summary = answer.describe()["metadata"]
        assert summary["cost_model_statement"]


# -- profiles that are named


def test_a_profile_is_given_by_name_or_path_in_a_short_form_or_in_full(profile: FittedCost) -> None:
    other = fitted(base_s=9e-3)
    path = saved(other)
    assert resolved(gpu="l40s", profile=NAME).profile == NAME
    for settings in ({"profile": path}, {"profile": Path(path)}, {"cost": f"profile:path={path}"}):
        answer = resolved(**settings)
        assert answer.profile == path
        assert isinstance(answer.cost, FittedCost)
        assert answer.cost.parameters == other.parameters
    assert resolved(cost={"kind": "profile", "name": NAME}).profile == NAME


def test_a_bundled_name_wins_over_a_file_of_that_name(profile: FittedCost, tmp_path: Path) -> None:
    other = fitted(base_s=9e-3)
    for name in (NAME, "my-profile"):
        save_profile(other, tmp_path / name)
    for given, expected in ((NAME, profile), (NAME.upper(), profile), (f"./{NAME}", other), ("my-profile", other)):
        answer = resolved(profile=given)
        assert isinstance(answer.cost, FittedCost)
        assert answer.cost.parameters == expected.parameters, given


def test_the_default_does_not_change_by_naming_it(profile: FittedCost) -> None:
    named: dict[str, Any] = {"profile": NAME}
    runs = [wt.simulate(None, **SMALL, **given) for given in ({}, named)]
    assert runs[0].summary == runs[1].summary


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"profile": "llama-h10"}, "no bundled profile 'llama-h10'; nearest: llama-h100"),
        ({"profile": NAME, "cost": "roofline"}, "profile= and cost= both say what a step costs"),
        ({"cost": {"kind": "profile"}}, "needs a path (of a file) or a name (of a bundled profile"),
        ({"cost": {"kind": "profile", "path": "a.json", "name": NAME}}, "leave path or name out"),
        (
            {"cost": {"kind": "constant", "step_s": "1ms", "noise": True}},
            "unknown key 'noise' in [cost]; it needs kind",
        ),
        ({"gpu": "l40s", "noise": True}, "noise needs a profile, and there is no bundled profile for"),
        ({"gpu": "l40s", "cost": {"refuse_outside": True}}, "refuse_outside needs a profile"),
        ({"profile": 3}, "profile = 3 must be the path of a profile.json or the name"),
    ],
)
def test_what_is_wrong_with_a_profile_is_named_with_its_remedy(
    profile: FittedCost, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ScenarioError) as error:
        resolved(**settings)
    assert complaint in str(error.value)


def test_a_profile_that_is_not_there_cannot_be_read(profile: FittedCost) -> None:
    with pytest.raises(ScenarioUnreadable, match=r"cannot read profile gone\.json: No such file"):
        resolved(profile="gone.json")


def test_a_profile_of_another_kind_has_neither_noise_nor_domain(profile: FittedCost) -> None:
    path = saved(ConstantCost(step_s=0.01))
    assert isinstance(resolved(profile=path).cost, ConstantCost)
    with pytest.raises(ScenarioError, match=r"noise needs a fitted profile, and mine\.json is of the kind constant"):
        resolved(profile=path, noise=True)


@pytest.mark.parametrize(
    ("origin", "differs"),
    [
        ({"model": "qwen2.5-7b"}, "model qwen2.5-7b, the scenario has meta-llama/Llama-3.1-8B-Instruct"),
        ({"gpu": "L40S"}, "gpu L40S, the scenario has H100-SXM"),
        ({"gpu": "some card"}, "gpu some card, the scenario has H100-SXM"),
        ({"dtype": "float16"}, "dtype float16, the scenario has bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8, the scenario has auto"),
        ({"gpu": None, "device": "cpu: some processor"}, "device cpu: some processor, the scenario has H100-SXM"),
        ({"quantization": "fp8"}, "quantization fp8, the scenario has none"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size 4, the scenario has 1"),
        ({"pipeline_parallel_size": "4"}, "pipeline_parallel_size 4, the scenario has 1"),
        ({"speculative_method": "eagle"}, "speculative_method eagle, the scenario has none"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens 3, the scenario has 0"),
        ({"enforce_eager": True}, "no CUDA graphs (enforce_eager), the scenario has them"),
        ({"enforce_eager": "True"}, "no CUDA graphs (enforce_eager), the scenario has them"),
        ({"cudagraph_mode": "NONE"}, "no CUDA graphs (enforce_eager), the scenario has them"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel true"),
        ({"async_scheduling": False}, "async_scheduling false, the scenario has true"),
        ({"model": "qwen2.5-7b", "gpu": "L40S"}, "Llama-3.1-8B-Instruct; gpu L40S, the scenario has H100-SXM"),
    ],
)
def test_a_profile_of_something_else_is_a_warning_that_lists_what_differs(
    profile: FittedCost, origin: dict[str, Any], differs: str
) -> None:
    (warning,) = resolved(profile=saved(fitted(**origin))).warnings
    assert warning.startswith("the profile mine.json was made for something else")
    assert differs in warning


@pytest.mark.parametrize(
    "origin",
    [
        {},
        {"model": "llama-3.1-8b", "gpu": "h100", "dtype": "bf16", "kv_cache_dtype": "bfloat16"},
        {"model": None, "gpu": None, "dtype": None, "kv_cache_dtype": None, "tensor_parallel_size": None},
        {"dtype": "auto", "tensor_parallel_size": "1"},
        {"model": "meta-llama/Llama-3.1-8B"},
        {"dtype": "torch.bfloat16", "kv_cache_dtype": "torch.bfloat16"},
        {"tensor_parallel_size": 1.0, "tp": "1", "pipeline_parallel_size": "1", "enforce_eager": "false"},
        {"quantization": "none", "speculative_method": "none", "num_speculative_tokens": 0, "cudagraph_mode": "FULL"},
        {"engine": "vLLM 0.32.0", "max_num_seqs": 10**6, "async_scheduling": True},
    ],
)
def test_other_names_of_the_same_and_what_is_not_stated_are_no_mismatch(
    profile: FittedCost, origin: dict[str, Any]
) -> None:
    assert resolved(profile=saved(fitted(**origin))).warnings == ()


@pytest.mark.parametrize(
    ("origin", "differs"),
    [
        ({"engine": "vLLM 0.20.1"}, "vLLM 0.20.1, the scenario has vLLM 0.32"),
        ({"vllm": "0.20.1"}, "vLLM 0.20.1, the scenario has vLLM 0.32"),
        ({"engine": "some other engine"}, "engine some other engine, the scenario has vLLM 0.32"),
        ({"max_num_seqs": 1}, "max_num_seqs 1, the scenario has 1,024"),
        ({"max_num_batched_tokens": "64"}, "max_num_batched_tokens 64, the scenario has 8,192"),
        ({"max_model_len": 64}, "max_model_len 64, the scenario has 131,072"),
        ({"block_size": 32}, "block_size 32, the scenario has 16"),
    ],
)
def test_limits_and_the_release_of_a_profile_are_remarked_on(
    profile: FittedCost, origin: dict[str, Any], differs: str
) -> None:
    answer = resolved(profile=saved(fitted(**origin)))
    assert answer.warnings == ()
    assert f"The profile mine.json was made with {differs}." in answer.notes


@pytest.mark.parametrize(
    ("origin", "complaint"),
    [
        ({"tensor_parallel_size": "two"}, "states tensor_parallel_size = 'two' of its origin, which must be a whole"),
        ({"tensor_parallel_size": 1.5}, "states tensor_parallel_size = 1.5"),
        ({"tensor_parallel_size": True}, "states tensor_parallel_size = True"),
        ({"tensor_parallel_size": 1, "tp": 2}, "states both tensor_parallel_size 1 and tp 2"),
        ({"pipeline_parallel_size": -1}, "states pipeline_parallel_size = -1"),
        ({"max_num_seqs": "many"}, "states max_num_seqs = 'many'"),
        ({"enforce_eager": "perhaps"}, "states enforce_eager = 'perhaps' of its origin, which must be true or false"),
        ({"gpu": 100}, "states gpu = 100 of its origin, which must be text"),
        ({"speculative_method": ["eagle"]}, "states speculative_method = ['eagle']"),
    ],
)
def test_a_fact_of_the_wrong_kind_is_named(profile: FittedCost, origin: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ScenarioError) as error:
        resolved(profile=saved(fitted(**origin)))
    assert complaint in str(error.value)
    assert "--provenance" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"num_hidden_layers": 4}, "with num_layers 32 (the scenario's: 4)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_format none (the scenario's: fp8)"),
    ],
)
@pytest.mark.parametrize("stated", [MODEL, "llama-3.1-8b", "somebody/Llama-3.1-8B-Instruct"])
def test_a_model_of_the_same_name_and_other_numbers_is_no_match(
    profile: FittedCost, tmp_path: Path, stated: str, changes: dict[str, Any], differs: str
) -> None:
    model = str(tmp_path / own_model(tmp_path, **changes))
    (warning,) = resolved(model=model, profile=saved(fitted(model=stated))).warnings
    assert differs in warning


def test_weights_that_a_profile_says_are_quantised_match_a_model_that_is(profile: FittedCost, tmp_path: Path) -> None:
    model = str(tmp_path / own_model(tmp_path, **OF_ONE_NAME["quantised"]))
    assert resolved(model=model, profile=saved(fitted(quantization="fp8"))).warnings == ()
    (warning,) = resolved(model=model, profile=saved(fitted(quantization="awq"))).warnings
    assert "quantization awq, the scenario has fp8, 8 bits" in warning


def test_a_speculating_scenario_matches_a_profile_of_one(profile: FittedCost) -> None:
    path = saved(fitted(speculative_method="eagle3", num_speculative_tokens=2))
    assert resolved(profile=path, speculative="eagle3:num_speculative_tokens=2,acceptance=0.7").warnings == ()


def test_an_error_that_does_not_hold_is_not_printed(profile: FittedCost) -> None:
    for answer, why in (
        (resolved(profile=saved(fitted(gpu="L40S"))), "the profile was made for something else"),
        (resolved(pipeline_parallel_size=2), "the profile's steps are not those of a pipeline's stages"),
    ):
        metadata = answer.describe()["metadata"]
        assert metadata["step_time_error_p50_percent"] is None
        assert metadata["step_time_error_p90_percent"] is None
        assert "4.2 %" not in told(answer)
        assert f"error not known: {why}" in told(answer)


def test_a_pipeline_says_what_its_stages_leave_out(profile: FittedCost) -> None:
    (calibrated,) = resolved(pipeline_parallel_size=2).warnings
    assert "cut into 2 equal stages" in calibrated
    assert "the stated error does not hold for it" in calibrated
    (plain,) = resolved(pipeline_parallel_size=2, cost="roofline").warnings
    assert "cut into 2 equal stages" in plain
    assert "stated error" not in plain
    assert resolved(pipeline_parallel_size=2, cost="constant:step_s=10ms").warnings == ()


def test_steps_that_verify_drafts_are_said_to_be_overpriced_by_a_profile(profile: FittedCost) -> None:
    drafts = "ngram:num_speculative_tokens=2,acceptance=0.7"
    said = "a step that verifies drafts is priced as a step of short prompt chunks"
    assert said in told(resolved(speculative=drafts))
    assert said not in told(resolved())
    assert said not in told(resolved(speculative=drafts, cost="roofline"))


@pytest.mark.parametrize("source", ["composed", "transferred", "measured"])
def test_noise_of_a_profile_that_was_not_measured_itself_is_told_of(profile: FittedCost, source: str) -> None:
    path = saved(fitted(source=source))
    said = (
        "The noise of mine.json is how real steps scatter around fits to them; that the profile as a whole may be off"
    )
    assert (said in told(resolved(profile=path, noise=True))) == (source != "measured")
    assert said not in told(resolved(profile=path))


@pytest.mark.parametrize(
    "origin",
    [
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 4.0},
        {"tensor_parallel_size": None, "tp": "4"},
        {"tensor_parallel_size": None, "tp": 4},
    ],
)
def test_a_profile_of_another_tensor_parallelism_is_refused_with_the_way_out(
    profile: FittedCost, origin: dict[str, Any]
) -> None:
    path = saved(fitted(**origin))
    with pytest.raises(ScenarioError) as error:
        resolved(profile=path)
    assert str(error.value).startswith("profile=: the profile mine.json is one of tensor_parallel_size 4, the scenario")
    assert "--tensor-parallel-size 4" in str(error.value)
    assert resolved(profile=path, tensor_parallel_size=4).warnings == ()


# -- noise and domain


def test_noise_is_off_unless_asked_for_and_the_same_for_the_same_seed(profile: FittedCost) -> None:
    plain, quiet, noisy, again, other = (
        wt.simulate(None, **SMALL, **given)
        for given in ({}, {"noise": False}, {"noise": True}, {"noise": True}, {"noise": True, "seed": 1})
    )
    assert quiet.summary == plain.summary
    assert plain.summary["step_time_noise"] is False
    assert noisy.summary["step_time_noise"] is True
    assert noisy.steps.end_ns.tolist() == again.steps.end_ns.tolist()
    assert noisy.steps.end_ns.tolist() != plain.steps.end_ns.tolist()
    assert noisy.steps.end_ns.tolist() != other.steps.end_ns.tolist()


def test_a_step_outside_of_the_box_stops_the_run_only_where_that_was_asked_for(
    profile: FittedCost, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(fitted(largest=64))
    run = wt.simulate(None, **SMALL, profile=path)
    assert any("lie outside of what the profile was measured at" in text for text in run.context.warnings)
    strict = {"kind": "profile", "path": path, "refuse_outside": True}
    with pytest.raises(OutsideDomain, match="prefill_tokens 100 is outside of 0 to 64"):
        wt.simulate(None, **SMALL, cost=strict)
    assert main(["simulate", *FLAGS, "--cost", f"profile:path={path},refuse_outside=true"]) == 2
    assert "error: this profile was not measured there" in capsys.readouterr().err
    assert main(["simulate", *FLAGS, "--cost", f"profile:path={path},refuse_outside=true", "--dry-run"]) == 0
    assert "a prompt of 2,048 tokens: outside of what the profile was measured at" in capsys.readouterr().out


# -- what every output says


STATED = "median 4.2 %, nine of ten within 11.3 %, against " + RESTS_ON


def test_text_html_markdown_and_json_state_the_error(profile: FittedCost, tmp_path: Path) -> None:
    run = wt.simulate(None, **SMALL)
    run.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    flat = " ".join(run.text().split())
    step_ms = 1e3 * run._median_step_s()  # type: ignore[operator]
    sentence = f"The median step of this run is {step_ms:.2f} ms, ± {0.042 * step_ms:.2f} ms for half of such steps"
    for output in (flat, page, run.markdown()):
        assert f"Step times: {COMPOSED}." in output
        assert f"Their error: {STATED}." in output
        assert sentence in output
        assert f"profile {NAME}" in output
    assert "uncalibrated" not in run.text() + run.markdown()
    assert run.summary["cost_model"] == "fitted"
    assert run.summary["cost_model_calibrated"] is True
    assert run.summary["cost_model_evidence"] == "composed"
    assert run.summary["cost_model_statement"] == COMPOSED
    assert run.summary["step_time_error_p50_percent"] == 4.2
    assert run.summary["step_time_error_p90_percent"] == 11.3
    assert run.summary["step_time_error_rests_on"] == RESTS_ON


def test_a_saved_run_states_it_as_well(profile: FittedCost, tmp_path: Path) -> None:
    run = wt.simulate(None, **SMALL, noise=True)
    run.save(tmp_path / "run")
    loaded = wt.load_run(tmp_path / "run")
    assert loaded.text() == run.text()
    assert "Steps scatter around that by what the profile states" in " ".join(loaded.text().split())


def test_a_dry_run_states_it_with_steps_that_anybody_can_picture(
    profile: FittedCost, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *FLAGS, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"cost model: profile {NAME} (composed, not measured)\n" in shown
    assert f"Their error: {STATED}.\n" in shown
    assert "- a decode of 64 requests, 1,024 tokens of context each: " in shown
    assert main(["simulate", *FLAGS, "--dry-run", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["metadata"]["step_time_error_p90_percent"] == 11.3
    assert plain["cost"]["provenance"]["statement"] == COMPOSED


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (None, "Their error is not known: no real steps were held against it."),
        (
            {"p50_percent": None, "p90_percent": None, "rests_on": "no card was at hand"},
            "not known: no card was at hand.",
        ),
    ],
)
def test_an_error_that_nobody_knows_is_said_to_be_unknown(profile: FittedCost, stated: Any, said: str) -> None:
    run = wt.simulate(None, **SMALL, profile=saved(fitted(stated_error=stated)))
    assert said in " ".join(run.text().split())
    assert "The median step" not in run.text()
    assert run.summary["step_time_error_p50_percent"] is None
    assert run.summary["step_time_error_rests_on"] is None


def test_a_measured_profile_states_the_error_of_its_own_fit(profile: FittedCost) -> None:
    path = saved(fitted(source="measured", statement=None, stated_error=None))
    text = " ".join(wt.simulate(None, **SMALL, profile=path).text().split())
    assert "Step times: fitted to steps that were measured." in text
    assert "median 1.2 %, nine of ten within 3.5 %, against 400 measured steps of shapes left out of the fit" in text


def test_the_roofline_states_no_error(profile: FittedCost) -> None:
    run = wt.simulate(None, **SMALL, cost="roofline")
    assert "Cost model: roofline, uncalibrated" in run.text()
    assert "Their error" not in run.text()
    assert run.summary["cost_model_statement"] is None


def test_a_comparison_states_the_error_of_each_cost_model(profile: FittedCost, tmp_path: Path) -> None:
    scenario = {
        "name": "two",
        "deployment": {"model": "llama-3.1-8b", "gpu": "h100"},
        "workload": {"num_requests": 20, "input": 100, "output": 8, "request_rate": 20},
    }
    alike = wt.compare(scenario, {"few": {"max_num_seqs": 2}, "many": {"max_num_seqs": 64}})
    text = " ".join(alike.text().split())
    assert text.count(f"Their error: {STATED}.") == 1
    other = saved(fitted(base_s=9e-3, stated_error={"p50_percent": 1.0, "p90_percent": 2.0, "rests_on": "its own"}))
    differing = wt.compare(scenario, {"bundled": {}, "mine": {"profile": other}})
    text = " ".join(differing.text().split())
    assert f"bundled: Step times: {COMPOSED}. Their error: {STATED}." in text
    assert f"mine: Step times: {COMPOSED}. Their error: median 1.0 %" in text
    differing.report(tmp_path / "two.html")
    assert f"mine: Step times: {COMPOSED}." in (tmp_path / "two.html").read_text()
    assert f"mine: Step times: {COMPOSED}." in differing.markdown()


def test_a_comparison_of_a_profile_with_the_roofline_is_warned_of(profile: FittedCost) -> None:
    scenario = {
        "name": "two",
        "deployment": {"model": "llama-3.1-8b", "gpu": "h100"},
        "workload": {"num_requests": 20, "input": 100, "output": 8, "request_rate": 20},
    }
    cards: dict[str, dict[str, Any]] = {"h100": {}, "l40s": {"gpu": "l40s"}}
    caution = "Step times rest on different evidence (composed, not measured; uncalibrated)"
    assert caution in " ".join(wt.compare(scenario, cards).text().split())
    alike = {name: {**own, "cost": "roofline"} for name, own in cards.items()}
    assert caution not in " ".join(wt.compare(scenario, alike).text().split())


def test_profiles_are_a_table_in_python(profile: FittedCost) -> None:
    table = wt.profiles()
    assert table.name.tolist() == [NAME]
    assert table.iloc[0][["model", "gpu", "p50_percent", "p90_percent"]].tolist() == [MODEL, GPU, 4.2, 11.3]
