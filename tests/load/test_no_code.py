"""No file can make the package run code: nothing in its sources could, and an audit of the interpreter sees nothing while one is opened."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyllm

from .test_checkpoint import model

ROOT = Path(pyllm.__file__).parent
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg", "yaml", "runpy", "code", "codeop",
    "imp", "multiprocessing", "torch.multiprocessing", "torch.hub", "torch.package", "torch.serialization", "safetensors.torch",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "torch.export.load", "np.load", "numpy.load", "np.fromfile", "ctypes.CDLL",
    "importlib.util.spec_from_file_location", "importlib.reload", "os.system", "os.popen",
}  # fmt: skip
ENDINGS = ("from_pretrained", "recv_pyobj", "send_pyobj", "exec_module", "load_module", "find_class")
PEERS = "measure/peers.py"  # runs the same requests in another library that the user named, for a comparison


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            if name in MODULES or name.partition(".")[0] in MODULES:
                yield f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in BUILTINS or name in CALLS or name.rpartition(".")[2] in ENDINGS:
            yield f"calls {name}"
        if name.endswith("import_module"):
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):  # f"pyllm....": a name of our own
                first = first.values[0]
            ours = isinstance(first, ast.Constant) and (str(first.value).startswith("pyllm.") or first is node.args[0])
            if not ours:
                yield "imports a module whose name is computed"
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "trust_remote_code", "shell"):
                yield f"passes {keyword.arg}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_can_run_what_a_file_says(path: Path) -> None:
    found = list(offences(path.read_text()))
    if path == ROOT / PEERS:
        found = [f for f in found if "from_pretrained" not in f]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from torch import multiprocessing", "import torch.hub", "eval('1')", "torch.load(p)",
        "np.load(p, allow_pickle=True)", "importlib.import_module(name)", "importlib.import_module(f'{a}.b')",
        "f(trust_remote_code=True)", "AutoModel.from_pretrained(p)", "import yaml",
        "from importlib import import_module; import_module(x)", "subprocess.run(x, shell=True)",
    ],
)  # fmt: skip
def test_the_search_finds_it(line: str) -> None:
    assert list(offences(line))


AUDIT = """
import json, sys
from pathlib import Path
import torch, pyllm.load, pyllm.load.inspection, pyllm.models  # noqa
from pyllm.load import open_checkpoint
from pyllm.load.inspection import inspect
root, events = str(Path(sys.argv[1])), []
def hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(root):
        events.append([event, str(args[0])])
    elif event in ("import", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "socket.connect",
                   "urllib.Request", "ctypes.dlopen", "marshal.loads"):
        events.append([event, str(args[0])])
    elif event == "exec" and not getattr(args[0], "co_filename", "").startswith("<template"):
        events.append([event, getattr(args[0], "co_filename", "")])
sys.addaudithook(hook)
found = open_checkpoint(root)
found.tokenizer.encode("ab")
try:
    found.render_chat([{"role": "user", "content": "hi"}])
except ValueError as error:
    events.append(["refused", str(error)])
for name in found.tensors:
    found.tensors[name].sum()
inspect(root, values=True)
print(json.dumps(events))
"""


def test_an_audit_of_opening_a_hostile_directory(tmp_path: Path) -> None:
    """The interpreter reports every import, process, socket and file: of this directory only the data files are opened, and nothing is
    imported from it, although its config, tokenizer and template ask for it and the code lies beside them."""
    bomb = f"open({str(tmp_path / 'ran')!r}, 'w')"
    files = {
        "config.json": {"architectures": ["EvilModel"], "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}},
        "tokenizer_config.json": {
            "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
            "tokenizer_class": "Evil",
            "chat_template": "{{ ''.__class__.__base__.__subclasses__() }}",
        },
        "generation_config.json": {"custom_generate": "evil.py"},
        **dict.fromkeys(("evil.py", "modeling_evil.py", "__init__.py", "sitecustomize.py", "conftest.py"), bomb),
        "pytorch_model.bin": b"cos\nsystem\n(S'touch ran'\ntR.",
        "adapter.pth": b"\x80\x04cos\nsystem\n.",
    }
    root = model(tmp_path, files)
    command = [sys.executable, "-c", AUDIT, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    events = json.loads(done.stdout)
    opened = {Path(path).name for event, path in events if event == "open"}
    expected = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"}
    assert opened == expected
    assert not (tmp_path / "ran").exists()
    assert any(event == "refused" and "chat template" in text for event, text in events)
    rest = [(event, text) for event, text in events if event not in ("open", "os.listdir", "os.scandir", "refused")]
    assert not [text for event, text in rest if "evil" in text.lower()]
    assert not [(event, text) for event, text in rest if event not in ("import", "exec", "marshal.loads")]
    site = [text for event, text in rest if event == "exec" and str(root) in text]
    assert not site
