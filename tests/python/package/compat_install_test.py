"""fovea.compat: modules and metadata in the place of another package's, and gone again; the two commands; the tables."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types

import pytest

import fovea

pytest.importorskip("torch")
from conftest import PACKAGE_SOURCES  # noqa: E402
from fovea import compat  # noqa: E402
from fovea.compat import __main__ as command, _drop_ins  # noqa: E402

ROOT = PACKAGE_SOURCES.parents[1]
INSTALLABLE = [name for name in _drop_ins.DROP_INS if name not in ("pallas_flexattn", "kvax") or importlib.util.find_spec("jax")]


@pytest.fixture(autouse=True)
def route():
    """In place of conftest's; what a test installs goes."""
    yield "extension"
    for name in compat.installed():
        compat.uninstall(name)


def test_imports_find_our_modules_while_installed() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    compat.install("flash_attn")
    assert compat.installed() == ("flash_attn",)
    import flash_attn.layers.rotary
    from flash_attn import bert_padding, flash_attn_func
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    ours = fovea.compat.flash_attn
    assert flash_attn is ours and flash_attn_func is ours.flash_attn_func and flash_attn_varlen_func is ours.flash_attn_varlen_func
    assert bert_padding is ours.bert_padding and flash_attn.layers.rotary is ours.layers.rotary
    compat.install("flash_attn")  # once more changes nothing
    compat.uninstall("flash_attn")
    compat.uninstall("flash_attn")
    assert compat.installed() == ()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_both_generations_live_side_by_side() -> None:
    compat.install("flash_attn_3")
    compat.install("flash_attn")
    import flash_attn
    import flash_attn_interface

    assert flash_attn_interface is fovea.compat.flash_attn_3 and flash_attn is fovea.compat.flash_attn
    compat.uninstall("flash_attn")
    assert importlib.import_module("flash_attn_interface") is flash_attn_interface


@pytest.mark.parametrize("name, root, distribution", [("flash_attn", "flash_attn", "flash-attn"), ("flash_attn_3", "flash_attn_interface", "flash-attn-3"), ("sageattention", "sageattention", "sageattention"), ("sageattn3", "sageattn3", "sageattn3")])
def test_package_managers_find_the_distribution(name, root, distribution) -> None:
    compat.install(name)
    version = importlib.import_module(root).__version__
    assert importlib.util.find_spec(root) is not None and importlib.util.find_spec(name) is not None  # diffusers wants the latter
    assert importlib.metadata.version(distribution) == version == importlib.metadata.version(distribution.replace("-", "_"))
    listed = importlib.metadata.packages_distributions()[root]
    assert [found.replace("_", "-") for found in listed] == [distribution]
    assert importlib.metadata.version("torch")  # others are found as before
    compat.uninstall(name)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(distribution)


def test_a_package_that_is_there_comes_back(monkeypatch) -> None:
    theirs = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.losses", "flash_attn.bert_padding", "flash_attnother")}
    for name, module in theirs.items():
        monkeypatch.setitem(sys.modules, name, module)
    compat.install("flash_attn")
    assert importlib.import_module("flash_attn.bert_padding") is fovea.compat.flash_attn.bert_padding
    with pytest.raises(ModuleNotFoundError):  # no half of it is theirs
        importlib.import_module("flash_attn.losses")
    assert sys.modules["flash_attnother"] is theirs["flash_attnother"]
    compat.uninstall("flash_attn")
    assert {name: sys.modules[name] for name in theirs} == theirs
    assert "flash_attn.layers" not in sys.modules


@pytest.mark.parametrize("function", [compat.install, compat.uninstall])
def test_other_names_are_refused(function) -> None:
    with pytest.raises(fovea.InvalidArgument, match="name is 'flashattn'; expected one of flash_attn, flash_attn_3"):
        function("flashattn")


# ---- The commands ----

SCRIPT = """
import sys
import helper_beside_it
from flash_attn import flash_attn_func
print(__name__, sys.argv[1:], flash_attn_func.__module__)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_runs_with_packages_in_place(tmp_path, is_module) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper_beside_it.py").touch()
    program = ["-m", "script"] if is_module else [str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-B", "-m", "fovea.compat", "run", "--drop-in", "flash_attn", *program, "--lr", "1"]
    answer = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.stdout == "__main__ ['--lr', '1'] fovea.compat.flash_attn.flash_attn_interface\n", answer.stderr


def test_list_prints_the_tables(capsys) -> None:
    assert command.main(["list", "flash_attn_3"]) == 0
    one = capsys.readouterr().out
    assert one.startswith("# flash_attn_3 3.0.0: flash_attn_3\n") and "| `pack_gqa` | taken | kernels decide |" in one
    assert "flash-attn" not in one
    assert command.main(["list"]) == 0
    assert one.strip() in capsys.readouterr().out


def test_list_ends_quietly_where_its_reader_does() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-B", "-m", "fovea.compat", "list"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(words, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_other_drop_ins_are_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(["run", "--drop-in", "xformers", "script.py"])
    assert stop.value.code == 2 and "invalid choice: 'xformers'" in capsys.readouterr().err


# ---- The tables ----


@pytest.mark.parametrize("name", _drop_ins.DROP_INS)
def test_a_page_has_the_table(name) -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "guides").glob("*.md")]
    assert any(_drop_ins.table(_drop_ins.DROP_INS[name]) in page for page in pages)


@pytest.mark.parametrize("name", INSTALLABLE)
def test_versions_are_those_of_the_modules(name) -> None:
    drop_in = _drop_ins.DROP_INS[name]
    assert importlib.import_module(next(iter(drop_in.modules.values()))).__version__ == drop_in.version


@pytest.mark.parametrize("name", INSTALLABLE)
def test_refused_parts_are_not_there(name) -> None:
    compat.install(name)
    for row in _drop_ins.DROP_INS[name].parts:
        for part in row.name.replace(" .", " flash_attn.").split(", "):
            if part.startswith(("flash_attn", "sageattn", "sageattention")):
                is_there = importlib.util.find_spec(part.strip()) is not None
                assert is_there == (row.verdict == "honoured"), part
