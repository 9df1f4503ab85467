"""The `[data]` table: what it means, and that nothing in it is misunderstood in silence."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import (
    DataConfig,
    DatasetSource,
    TrainingPhase,
    data_path,
    load_config,
    parse_config,
    resolve,
)
from penstock.errors import ConfigError, MissingData

WEB, CODE = DatasetSource("tokens/web", 3.0), DatasetSource("tokens/code", 1.0)
MIXTURE = DataConfig(datasets=[WEB, CODE])


def refusal(make: Any, *args: Any, **kwargs: Any) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(ConfigError) as caught:
        make(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------- fields, defaults


def test_the_fields_have_the_documented_order_and_defaults() -> None:
    defaults = {f.name: getattr(DataConfig(), f.name) for f in dataclasses.fields(DataConfig)}
    assert list(defaults.items()) == [
        ("dataset_path", ""),
        ("file_pattern", "*.npy"),
        ("tokenizer_path", ""),
        ("num_workers", 4),
        ("pin_memory", True),
        ("prefetch_factor", 2),
        ("pack_sequences", False),
        ("hf_dataset_name", None),
        ("hf_dataset_config", None),
        ("hf_dataset_split", "train"),
        ("hf_dataset_text_field", "text"),
        ("hf_streaming", False),
        ("datasets", []),
        ("mix_temperature", 1.0),
        ("phases", []),
        ("anneal_start_step", 0),
        ("anneal_weights", {}),
        ("token_dtype", None),
        ("weights_count", "samples"),
        ("packing", None),
        ("balance", None),
        ("on_max_epochs", "error"),
    ]
    assert dataclasses.astuple(DatasetSource()) == ("", 1.0, "", "", "", None)
    assert dataclasses.astuple(TrainingPhase()) == (0, {}, 1.0)


def test_fields_of_our_own_are_keyword_only() -> None:
    documented = [f for f in dataclasses.fields(DataConfig) if not f.kw_only]
    DataConfig(*(getattr(DataConfig(), f.name) for f in documented))
    assert [f.name for f in dataclasses.fields(DataConfig) if f.kw_only] == [
        "token_dtype",
        "weights_count",
        "packing",
        "balance",
        "on_max_epochs",
    ]
    assert [f.name for f in dataclasses.fields(DatasetSource) if f.kw_only] == ["max_epochs"]


def test_a_config_cannot_be_changed_and_shares_no_list_or_dict_with_its_caller() -> None:
    weights, phases, sources = {"web": 2}, [TrainingPhase(5)], [WEB]
    config = DataConfig(datasets=sources, phases=phases)
    annealed = DataConfig(anneal_start_step=5, anneal_weights=weights)
    phase = TrainingPhase(1, weights)
    phases.clear(), sources.clear(), weights.clear()
    assert (config.phases, config.datasets) == ([TrainingPhase(5)], [WEB])
    assert annealed.anneal_weights == phase.dataset_weights == {"web": 2.0}
    assert annealed.active_phases[0].dataset_weights is not annealed.anneal_weights
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_workers = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        WEB.weight = 1.0  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        config.num_worker = 1  # type: ignore[attr-defined]


def test_replace_checks_again_and_pickle_keeps_a_config() -> None:
    assert dataclasses.replace(MIXTURE, num_workers=0).datasets == [WEB, CODE]
    assert "non-negative" in refusal(dataclasses.replace, MIXTURE, num_workers=-1)
    assert pickle.loads(pickle.dumps(MIXTURE)) == MIXTURE


def test_numbers_and_paths_become_plain_values() -> None:
    config = DataConfig(PurePosixPath("a/b"), num_workers=np.int64(3), mix_temperature=2)  # type: ignore[arg-type]
    assert (config.dataset_path, config.num_workers, config.mix_temperature) == ("a/b", 3, 2.0)
    assert [type(getattr(config, k)) for k in ("dataset_path", "num_workers")] == [str, int]
    assert type(config.mix_temperature) is float
    assert type(DatasetSource(weight=np.float64(0.5)).weight) is float
    assert "found np.float32(0.5)" in refusal(DatasetSource, weight=np.float32(0.5))


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("num_workers", True, "int"),
        ("num_workers", 4.0, "int"),
        ("num_workers", "4", "int"),
        ("num_workers", None, "int"),
        ("pin_memory", "true", "bool"),
        ("pin_memory", 1, "bool"),
        ("pin_memory", np.bool_(True), "bool"),
        ("mix_temperature", "1.0", "float"),
        ("mix_temperature", False, "float"),
        ("mix_temperature", 1j, "float"),
        ("dataset_path", None, "str"),
        ("dataset_path", b"a", "str"),
        ("hf_dataset_name", 3, "str | None"),
        ("datasets", {"path": "a"}, "list[DatasetSource]"),
        ("datasets", [{"path": "a"}], "list[DatasetSource]"),
        ("phases", "x", "list[TrainingPhase]"),
        ("phases", [WEB], "list[TrainingPhase]"),
        ("anneal_weights", [1.0], "dict[str, float]"),
        ("token_dtype", 16, "str | None"),
    ],
)
def test_a_wrong_type_is_named_with_what_was_found_and_expected(
    key: str, value: Any, kind: str
) -> None:
    found = refusal(DataConfig, **{key: value})
    assert found.startswith(f"{key} must be {kind}, found ")
    assert found.endswith(f"({type(value).__name__})")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_workers", -1, "num_workers must be non-negative, found -1"),
        ("prefetch_factor", 0, "prefetch_factor must be >= 1, found 0"),
        ("mix_temperature", 0, "mix_temperature must be positive, found 0"),
        ("mix_temperature", -0.5, "mix_temperature must be positive, found -0.5"),
        ("mix_temperature", float("nan"), "mix_temperature must be finite, found nan"),
        ("mix_temperature", float("inf"), "mix_temperature must be finite, found inf"),
        ("anneal_start_step", -1, "anneal_start_step must be non-negative, found -1"),
        ("anneal_weights", {"a": -1}, "anneal_weights['a'] must be non-negative, found -1"),
        ("anneal_weights", {3: 1}, "a name in anneal_weights must be str, found 3 (int)"),
        ("token_dtype", "float32", "token_dtype must be one of uint8, uint16"),
        ("weights_count", "docs", "weights_count must be one of samples, tokens, found 'docs'"),
        ("on_max_epochs", "stop", "on_max_epochs must be one of error, warn, found 'stop'"),
        ("hf_streaming", True, "hf_streaming needs hf_dataset_name"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(key: str, value: Any, words: str) -> None:
    assert refusal(DataConfig, **{key: value}).startswith(words)


@pytest.mark.parametrize("weight", [0, -1, -0.0, float("nan"), float("inf"), -float("inf")])
def test_a_base_weight_is_positive_and_finite(weight: float) -> None:
    assert re.match("weight must be (positive|finite)", refusal(DatasetSource, "a", weight))
    refusal(DatasetSource, "a", weight=10**400)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "1"])
def test_a_phase_weight_is_a_finite_number_not_below_zero(weight: Any) -> None:
    assert refusal(TrainingPhase, 1, {"a": weight}).startswith("dataset_weights['a'] must be ")
    assert TrainingPhase(1, {"a": 0}).dataset_weights == {"a": 0.0}


def test_a_phase_starts_at_a_step_and_scales_by_something_positive() -> None:
    assert refusal(TrainingPhase, -1) == "start_step must be non-negative, found -1"
    assert refusal(TrainingPhase, 10.0) == "start_step must be int, found 10.0 (float)"
    for scale in (0.0, -0.5, float("nan"), float("inf")):
        assert refusal(TrainingPhase, lr_scale=scale).startswith("lr_scale must be ")


def test_phases_follow_one_another() -> None:
    for steps in ([200, 100], [100, 100], [0, 5, 5]):
        phases = [TrainingPhase(step) for step in steps]
        assert "strictly monotonically increasing" in refusal(DataConfig, phases=phases)
    DataConfig(phases=[TrainingPhase(0), TrainingPhase(1)])


def test_phases_and_the_annealing_shortcut_exclude_each_other() -> None:
    for shortcut in ({"anneal_start_step": 200}, {"anneal_weights": {"a": 1.0}}):
        message = refusal(DataConfig, phases=[TrainingPhase(100)], **shortcut)
        assert message.startswith("Cannot use both phases and anneal_start_step")


def test_a_source_has_exactly_one_place_and_another_name_than_the_others() -> None:
    for sources, words in [
        (
            [DatasetSource(weight=1.0)],
            "datasets[0] must have either path or hf_name, found neither",
        ),
        ([WEB, DatasetSource("a", hf_name="b")], "datasets[1] must have either path or hf_name"),
        (
            [DatasetSource("a", hf_config="en")],
            "datasets[0] has hf_config, which goes with hf_name",
        ),
        ([WEB, DatasetSource("other/web/")], "datasets[0] and datasets[1] are both called 'web'"),
        ([WEB, DatasetSource(hf_name="x", name="web")], "datasets[0] and datasets[1] are both"),
    ]:
        assert refusal(DataConfig, datasets=sources).startswith(words)
    DataConfig(datasets=[WEB, DatasetSource("other/web", name="web2")])


def test_streaming_does_not_go_with_a_mixture() -> None:
    message = refusal(dataclasses.replace, MIXTURE, hf_streaming=True, hf_dataset_name="a/b")
    assert message.startswith("hf_streaming does not go with datasets")


def test_a_schedule_that_names_an_unknown_dataset_is_told_the_nearest() -> None:
    phases = [TrainingPhase(1, {"web": 1}), TrainingPhase(2, {"Coed": 1})]
    message = refusal(dataclasses.replace, MIXTURE, phases=phases)
    assert message == ("phases[1].dataset_weights names an unknown dataset, 'Coed' (meant: code?)")
    message = refusal(
        dataclasses.replace, MIXTURE, anneal_start_step=1, anneal_weights={"books": 1}
    )
    assert message == "anneal_weights names an unknown dataset, 'books' (known: web, code)"


def test_a_phase_leaves_some_dataset_with_a_weight() -> None:
    nothing = [TrainingPhase(1, {"web": 0, "code": 0})]
    message = refusal(dataclasses.replace, MIXTURE, phases=nothing)
    assert message.startswith("phases[0].dataset_weights leaves no dataset with any weight")
    dataclasses.replace(MIXTURE, phases=[TrainingPhase(1, {"web": 0})])


def test_half_an_annealing_shortcut_is_refused_where_there_are_datasets() -> None:
    for half in ({"anneal_start_step": 5}, {"anneal_weights": {"web": 1}}):
        assert refusal(dataclasses.replace, MIXTURE, **half).endswith("set both, or neither")


def test_a_schedule_without_datasets_is_made_but_not_resolved() -> None:
    """People's scripts and suites build schedules before they name their data."""
    for schedule in (
        {"anneal_start_step": 100},
        {"anneal_weights": {"code": 0.5}},
        {"anneal_start_step": 100, "anneal_weights": {"code": 0.5}},
        {"phases": [TrainingPhase(100, {"code": 0.5})]},
    ):
        config = DataConfig("tokens/web", **schedule)  # type: ignore[arg-type]
        refusal(resolve, config)
    DataConfig("tokens/web", phases=[TrainingPhase(100, {"web": 0.5})])


# ------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (DatasetSource("/data/web_tokens"), "web_tokens"),
        (DatasetSource("/data/web_tokens/"), "web_tokens"),
        (DatasetSource("web"), "web"),
        (DatasetSource("."), "."),
        (DatasetSource("/"), "/"),
        (DatasetSource("a/web", name="prose"), "prose"),
        (DatasetSource(hf_name="allenai/c4"), "allenai/c4"),
        (DatasetSource(hf_name="allenai/c4", hf_config="en"), "allenai/c4:en"),
        (DatasetSource(hf_name="allenai/c4", hf_config="en", name="c4"), "c4"),
    ],
)
def test_a_source_is_called_by_its_name_or_after_its_place(
    source: DatasetSource, name: str
) -> None:
    assert source.source_name == name
    assert DataConfig(datasets=[source]).source_names == (name,)
    assert resolve(DataConfig(datasets=[source])).sources[0].name == name


def test_the_first_way_to_read_that_is_set_applies() -> None:
    hub = DataConfig(hf_dataset_name="allenai/c4")
    assert data_path(hub) == "hub"
    assert data_path(dataclasses.replace(hub, hf_streaming=True)) == "hub_stream"
    assert data_path(dataclasses.replace(hub, hf_streaming=True, dataset_path="a")) == "tokens"
    assert data_path(dataclasses.replace(hub, dataset_path="a", datasets=[WEB])) == "mixture"
    assert "dataset_path" in refusal(data_path, DataConfig())
    assert "dataset_path" in refusal(resolve, DataConfig(hf_dataset_name=""))


def test_the_learning_rate_follows_the_last_phase_begun() -> None:
    config = DataConfig(phases=[TrainingPhase(10, lr_scale=0.5), TrainingPhase(20, lr_scale=2)])
    scales = [config.lr_scale(step) for step in (0, 9, 10, 19, 20, 10**15)]
    assert scales == [1.0, 1.0, 0.5, 0.5, 2.0, 2.0]
    assert DataConfig(anneal_start_step=5, anneal_weights={"a": 1}).lr_scale(9) == 1.0
    assert refusal(config.lr_scale, -1) == "step must be non-negative, found -1"
    assert refusal(config.lr_scale, 1.5) == "step must be int, found 1.5 (float)"


def test_a_single_dataset_resolves_to_a_mixture_of_one_with_the_schedule_of_its_lr() -> None:
    config = DataConfig("tokens/web", phases=[TrainingPhase(7, lr_scale=0.5)])
    resolved = resolve(config)
    assert resolved.sources == (DatasetSource("tokens/web", name="web"),)
    assert [(s.start_step, s.weights, s.lr_scale) for s in resolved.stages] == [
        (0, (1.0,), 1.0),
        (7, (1.0,), 0.5),
    ]
    (source,) = resolve(DataConfig(hf_dataset_name="a/b", hf_dataset_config="en")).sources
    assert source == DatasetSource(hf_name="a/b", hf_config="en", name="a/b:en")


def test_a_source_left_out_of_a_phase_has_its_base_weight() -> None:
    phases = [TrainingPhase(5, {"web": 0}), TrainingPhase(9, {"code": 9})]
    stages = resolve(dataclasses.replace(MIXTURE, phases=phases)).stages
    assert [stage.weights for stage in stages] == [(0.75, 0.25), (0.0, 1.0), (0.25, 0.75)]


def test_a_phase_at_step_zero_takes_the_place_of_the_base_weights() -> None:
    stages = resolve(dataclasses.replace(MIXTURE, phases=[TrainingPhase(0, {"code": 9})])).stages
    assert [(stage.start_step, stage.weights) for stage in stages] == [(0, (0.25, 0.75))]


def test_the_annealing_shortcut_is_a_phase() -> None:
    weights = {"code": 9.0}
    short = dataclasses.replace(MIXTURE, anneal_start_step=5, anneal_weights=weights)
    long = dataclasses.replace(MIXTURE, phases=[TrainingPhase(5, weights)])
    assert short.active_phases == long.active_phases
    assert resolve(short) == resolve(long)


def test_the_temperature_applies_in_every_phase_and_a_zero_does_not_leak() -> None:
    config = DataConfig(
        datasets=[DatasetSource("a", 9), DatasetSource("b", 1)],
        phases=[TrainingPhase(1, {"a": 1, "b": 16}), TrainingPhase(2, {"a": 0})],
        mix_temperature=2.0,
    )
    weights = [stage.weights for stage in resolve(config).stages]
    assert weights == [(0.75, 0.25), (0.2, 0.8), (0.0, 1.0)]


# ------------------------------------------------------------------------------- TOML


def toml(value: Any) -> str:
    """A value as TOML; tables inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def as_toml(config: DataConfig) -> str:
    table = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    return "[data]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
positive = st.floats(1e-6, 1e6)


@st.composite
def configs(draw: st.DrawFn) -> DataConfig:
    names = draw(st.lists(words.filter(bool), max_size=4, unique=True))
    places = [draw(st.sampled_from([{"path": "a"}, {"hf_name": "a/b"}])) for _ in names]
    sources = [
        DatasetSource(
            weight=draw(positive), name=name, max_epochs=draw(st.none() | positive), **place
        )
        for name, place in zip(names, places, strict=True)
    ]
    # some source always keeps its base weight
    weights = st.dictionaries(st.sampled_from(names[1:]), st.just(0.0) | positive)
    weights = weights if len(names) > 1 else st.just({})
    schedule: dict[str, Any] = {"phases": []}
    if draw(st.booleans()):
        steps = sorted(draw(st.sets(st.integers(0, 10**12), max_size=3)))
        schedule["phases"] = [TrainingPhase(s, draw(weights), draw(positive)) for s in steps]
    elif annealed := draw(weights):
        schedule = {"anneal_start_step": draw(st.integers(1, 10**12)), "anneal_weights": annealed}
    return DataConfig(
        dataset_path=draw(words),
        file_pattern=draw(words),
        tokenizer_path=draw(words),
        num_workers=draw(st.integers(0, 64)),
        pin_memory=draw(st.booleans()),
        prefetch_factor=draw(st.integers(1, 64)),
        pack_sequences=draw(st.booleans()),
        hf_dataset_name=draw(st.none() | words),
        hf_dataset_config=draw(st.none() | words),
        datasets=sources,
        mix_temperature=draw(positive),
        token_dtype=draw(st.sampled_from([None, "uint16", "int64"])),
        weights_count=draw(st.sampled_from(["samples", "tokens"])),
        on_max_epochs=draw(st.sampled_from(["error", "warn"])),
        **schedule,
    )


@given(configs())
def test_written_as_toml_and_read_it_is_the_same_config(config: DataConfig) -> None:
    assert parse_config(as_toml(config)) == config


@given(configs().filter(lambda config: config.datasets))
def test_every_stage_has_a_share_for_every_source(config: DataConfig) -> None:
    resolved = resolve(config)
    assert [source.name for source in resolved.sources] == list(config.source_names)
    starts = [stage.start_step for stage in resolved.stages]
    assert starts == sorted({0, *(phase.start_step for phase in config.active_phases)})
    for stage in resolved.stages:
        assert len(stage.weights) == len(resolved.sources)
        assert stage.lr_scale == config.lr_scale(stage.start_step)


def test_a_file_is_read_and_its_other_tables_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        seed = 42
        [train]
        max_steps = 10
        num_workers = "not ours"
        [model.attention]
        heads = 8
        [[data.datasets]]
        path = "/data/web"
        weight = 7              # an int for a float
        [[data.datasets]]
        hf_name = "allenai/c4"
        name = "c4"
        [[data.phases]]
        start_step = 1_000
        lr_scale = 0.5
        [data.phases.dataset_weights]
        c4 = 3
        """
    )
    config = DataConfig(
        datasets=[DatasetSource("/data/web", 7.0), DatasetSource(hf_name="allenai/c4", name="c4")],
        phases=[TrainingPhase(1_000, {"c4": 3.0}, 0.5)],
    )
    assert load_config(path) == load_config(str(path)) == config


def test_the_documented_table_loads_as_it_is_written() -> None:
    text = """
    [data]
    dataset_path = ""
    file_pattern = "*.npy"
    tokenizer_path = ""
    num_workers = 4
    pin_memory = true
    prefetch_factor = 2
    pack_sequences = false
    hf_dataset_name = ""
    hf_dataset_config = ""
    hf_dataset_split = "train"
    hf_dataset_text_field = "text"
    hf_streaming = false
    datasets = []
    mix_temperature = 1.0
    phases = []
    anneal_start_step = 0
    anneal_weights = {}
    """
    assert parse_config(text) == DataConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nnum_worker = 4", "data.num_worker (meant: num_workers?)"),
        ("[data]\nDataset_Path = 'a'", "data.Dataset_Path (meant: dataset_path?)"),
        ("[data]\nnum_worker = 4\nphase = 1", "num_workers?), data.phase (meant: phases?)"),
        (
            "[[data.phases]]\nstart_step = 1\ntypo_field = 'oops'",
            "data.phases[0].typo_field (known: start_step, dataset_weights, lr_scale)",
        ),
        (
            "[[data.datasets]]\npath = 'a'\n[[data.datasets]]\npath = 'b'\nwieght = 2",
            "data.datasets[1].wieght (meant: weight?)",
        ),
    ],
)
def test_an_unknown_key_is_given_in_full_with_the_nearest_known_one(text: str, words: str) -> None:
    message = refusal(parse_config, text, "run.toml")
    assert message.startswith("run.toml: Unknown config keys: ")
    assert message.endswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nnum_workers = -1", "run.toml, data: num_workers must be non-negative, found -1"),
        ("[data]\nnum_workers = 4.0", "run.toml, data: num_workers must be int, found 4.0 (float)"),
        (
            "[data]\npin_memory = 'yes'",
            "run.toml, data: pin_memory must be bool, found 'yes' (str)",
        ),
        (
            "[data]\nmix_temperature = nan",
            "run.toml, data: mix_temperature must be finite, found nan",
        ),
        (
            "[[data.datasets]]\npath = 'a'\n[[data.datasets]]\npath = 'b'\nweight = 0",
            "run.toml, data.datasets[1]: weight must be positive, found 0",
        ),
        (
            "[[data.phases]]\nstart_step = 1979-05-27",
            "run.toml, data.phases[0]: start_step must be int, found datetime.date",
        ),
        (
            "[[data.phases]]\ndataset_weights = {a = {b = 1}}",
            "run.toml, data.phases[0]: dataset_weights['a'] must be float, found {'b': 1} (dict)",
        ),
        (
            "[data.datasets]\npath = 'a'",
            "run.toml: data.datasets must be tables, [[data.datasets]], found {'path': 'a'}",
        ),
        (
            "[data]\nphases = [1]",
            "run.toml: data.phases must be tables, [[data.phases]], found [1]",
        ),
        (
            "[[data.datasets]]\npath = 'web'\n[[data.phases]]\ndataset_weights = {wed = 1}",
            "run.toml, data: phases[0].dataset_weights names an unknown dataset, 'wed' (meant",
        ),
    ],
)
def test_an_error_names_the_file_the_table_and_the_key(text: str, words: str) -> None:
    assert refusal(parse_config, text, "run.toml").startswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "run.toml has no table [data]"),
        ("[train]\nmax_steps = 1", "run.toml has no table [data]"),
        ("[dta]\nnum_workers = 1", "run.toml has no table [data], but dta = {'num_workers': 1}"),
        ("[Data]\nnum_workers = 1", "run.toml has no table [data], but Data = {'num_workers': 1}"),
        ("data = 3", "run.toml has no table [data], but data = 3"),
        (
            "[[data]]\nnum_workers = 1",
            "run.toml has no table [data], but data = [{'num_workers': 1}]",
        ),
        ("num_workers = 1", "run.toml: num_workers must stand in a table, under [data]"),
        ("pin_memory = true\n[data]", "run.toml: pin_memory must stand in a table, under [data]"),
        (
            "[data]\n[[phases]]\nstart_step = 1",
            "run.toml: phases must stand in a table, under [data]",
        ),
    ],
)
def test_a_table_that_went_astray_is_noticed(text: str, words: str) -> None:
    assert refusal(parse_config, text, "run.toml") == words


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"[data]\nnum_workers 4\n", 2),
        (b"[data]\nnum_workers = 4\nnum_workers = 5\n", 3),
        (b"[data]\nfile_pattern = 'a", 2),
        (b"[data]\ndatasets = [\n", 3),
        (b"[data]\n\nfile_pattern = '\xff'\n", 3),
    ],
)
def test_a_file_that_is_not_toml_is_named_with_the_line(
    tmp_path: Path, text: bytes, line: int
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    message = refusal(load_config, path)
    assert message.startswith(f"{path} is not valid TOML: ")
    assert f"line {line}" in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"no\.toml does not exist"):
        load_config(tmp_path / "no.toml")
    assert "cannot be read: Is a directory" in refusal(load_config, tmp_path)


def test_a_byte_order_mark_and_crlf_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[data]\r\nnum_workers = 1\r\n")
    assert load_config(path).num_workers == 1


def test_the_config_is_read_without_importing_torch_or_pyarrow() -> None:
    code = "import penstock.config, sys; print({'torch', 'pyarrow'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"
