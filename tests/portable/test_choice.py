"""Which aiter a process gets, and the portable one's settings."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import portable
from bench.basics import PROJECT_ROOT
from tests.portable.calls import aiter

PORTABLE = PROJECT_ROOT / "portable/aiter/__init__.py"


def run_python(code: str, **environment: str):
    """What the code prints as JSON, run from the project's directory."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=PROJECT_ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_unrelated_aiter_does_not_win(tmp_path):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("from . import mla\n")
    (tmp_path / "aiter" / "mla.py").write_text("marker = 'unrelated'\n")
    file, decodes = run_python(
        """
        import aiter, aiter.mla, json
        assert aiter.mla.marker == "unrelated"
        import reference, aiter
        print(json.dumps([aiter.__file__, hasattr(aiter.mla, "mla_decode_fwd")]))
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert Path(file) == PORTABLE
    assert decodes


def test_portable_on_the_path_serves_other_programs():
    file = run_python(
        "from aiter.mla import mla_decode_fwd; import aiter, json; print(json.dumps(aiter.__file__))",
        PYTHONPATH="portable",
    )
    assert Path(file) == PORTABLE


@pytest.fixture
def on_rocm(monkeypatch):
    """A function that gives this ROCm torch an installed aiter with this mla_decode_fwd, or without one."""
    monkeypatch.setattr(torch.version, "hip", "7.1")

    def install(decode=None):
        for name in ("aiter", "aiter.mla"):
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        if decode:
            sys.modules["aiter.mla"].mla_decode_fwd = decode
        return sys.modules["aiter"]

    return install


def test_on_rocm_the_installed_one_is_used(on_rocm):
    installed = on_rocm(aiter.mla.mla_decode_fwd)
    assert portable.choose_aiter.__wrapped__() is installed


def test_on_rocm_one_that_lacks_a_parameter_is_refused(on_rocm):
    on_rocm(lambda q, kv_buffer, num_kv_splits=None, q_scale=None, kv_scale=None, work_meta_data=None: None)
    with pytest.raises(RuntimeError, match="lacks the parameters page_size, intra_batch_mode: install AMD's aiter"):
        portable.choose_aiter.__wrapped__()


def test_on_rocm_one_without_mla_decode_is_refused(on_rocm):
    on_rocm()
    with pytest.raises(RuntimeError, match=r"has no MLA decode \(.*mla_decode_fwd.*\): install AMD's aiter"):
        portable.choose_aiter.__wrapped__()


def test_on_rocm_none_at_all_is_refused(on_rocm, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="not installed for this ROCm torch: install AMD's aiter"):
        portable.choose_aiter.__wrapped__()


def test_settings_from_the_environment():
    settings = run_python(
        "import aiter, json; print(json.dumps(vars(aiter.settings)))",
        PYTHONPATH="portable",
        PORTABLE_AITER_NUM_CUS="304",
        PORTABLE_AITER_DOCUMENTED_PAGING="1",
    )
    assert settings == {"num_cus": 304, "documented_paging": True}


def test_settings_end_with_their_block():
    with aiter.settings.using(num_cus=8):
        assert aiter.settings.num_cus == 8
    assert aiter.settings.num_cus == 256
    with pytest.raises(AttributeError), aiter.settings.using(cus=8):
        pass
