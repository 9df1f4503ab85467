"""What `import penstock` gives, and what it costs: the names listed here, and nothing heavy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "numpy", "pyarrow", "h5py", "rich"]

# The public interface. A name leaves this list only with a major version.
PUBLIC = """
    BaseDataset ConfigError DPODataset DataConfig DataError DatasetFactory DatasetSource
    DistributedSampler Forecast GRPODataset H5Store HuggingFaceDataset MemoryMappedDataset
    MissingData MissingExtra MixtureDataset MixtureOrder MixtureSampler MmapStore ORDER_VERSION
    OutOfBounds PackedDataset PenstockError Permutation Pipeline PipelineConfig Plan
    ResumableDistributedSampler SEQDataset SFTDataset ShardWriter Stage StateMismatch
    StatefulDataLoader Store StoreFactory StreamingHuggingFaceDataset TextStream TrainingPhase
    WindowDataset __version__ build_dataloader detect_format dpo_collate_fn edit_state forecast_run
    grpo_collate_fn load_config merge_states open_store open_tokenizer pack_rows
    tokenizing_distributed_data_loader tokenizing_distributed_data_loader_bos_bestfit
    tokenizing_distributed_data_loader_with_state
    tokenizing_distributed_data_loader_with_state_bos_bestfit verify
""".split()  # noqa: SIM905 - forty lines of one name each read no better


def heavy_modules_after(code: str) -> list[str]:
    """Which of HEAVY a fresh interpreter has imported after `code`."""
    code += f"\nimport json, sys; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def test_the_probe_notices_a_heavy_module() -> None:
    assert heavy_modules_after("import rich") == ["rich"]


def test_import_penstock_imports_nothing_heavy() -> None:
    assert heavy_modules_after("import penstock; dir(penstock)") == []


def test_errors_can_be_caught_without_importing_anything_heavy() -> None:
    assert heavy_modules_after("import penstock; penstock.PenstockError") == []


@pytest.mark.parametrize("arguments", [["--help"], ["verify", "--help"], ["no-such-command"]])
def test_the_help_of_the_command_line_imports_nothing_heavy(arguments: list[str]) -> None:
    run = f"""
from click.testing import CliRunner
from penstock.cli import main
result = CliRunner().invoke(main, {arguments})
assert result.output
"""
    before = heavy_modules_after("import click.testing")
    assert heavy_modules_after(run) == before


def test_version_does_not_import_torch() -> None:
    run = "from penstock.cli import main; main(['--version'], standalone_mode=False)"
    assert "torch" not in heavy_modules_after(run)


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(penstock.__all__) == sorted(PUBLIC)
    assert dir(penstock) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_comes_from_its_room(name: str) -> None:
    value = getattr(penstock, name)
    if isinstance(value, type) or callable(value):
        assert value.__module__.startswith(penstock._HOME[name])


def test_type_checkers_see_the_names_that_are_imported_lazily() -> None:
    tree = ast.parse((ROOT / "src/penstock/__init__.py").read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock.")
        for alias in node.names
    }
    assert seen == penstock._HOME
    assert {*seen, "__version__"} == set(penstock.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'MixtureSample'; .*'MixtureSampler'"):
        penstock.MixtureSample  # noqa: B018 - looking is the test
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        penstock.zzz  # noqa: B018 - looking is the test
    assert not hasattr(penstock, "__path_hook__")


def test_the_version_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert penstock.__version__ == project["version"]


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").is_file()
