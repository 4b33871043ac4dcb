"""A machine on which triton-ascend finds an NPU: stand-ins for CANN's two compilers, for the C++ compiler and for
torch_npu, so that triton-ascend's own driver and launcher code runs as it is.

What a launcher is called with is appended to `builtins.launches`, where there is such a list.

The C++ compiler (`CC`) writes down what it is asked for, and makes a Python extension with what triton-ascend calls.
Of three launchers the second and the third are ready once both have been begun.
"""

import os
import sys
from pathlib import Path

__all__ = ["compiled_so_far", "environment"]

_BISHENG = "print('hiipu64')"

_BISHENGIR = """
if "--help" in sys.argv:
    print("limit-auto-multi-buffer-buffer")
else:
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1] + ".o").write_bytes(b"a kernel")
"""

_EXTENSION = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {
  PyObject *launches = PyObject_GetAttrString(PyImport_AddModule("builtins"), "launches");
  if (launches == NULL) { PyErr_Clear(); Py_RETURN_NONE; }
  return PyObject_CallMethod(launches, "append", "(O)", args);
}
static PyObject *loaded(PyObject *self, PyObject *args) { return Py_BuildValue("(iiii)", 1, 1, 0, 0); }
static PyObject *arch(PyObject *self, PyObject *args) { return Py_BuildValue("s", "Ascend910B4"); }
static PyObject *cores(PyObject *self, PyObject *args) { return Py_BuildValue("i", 20); }
static PyMethodDef methods[] = {
  {"launch", launch, METH_VARARGS, ""}, {"load_kernel_binary", loaded, METH_VARARGS, ""},
  {"get_arch", arch, METH_VARARGS, ""}, {"get_aicore_num", cores, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""

_CXX = """
import os, subprocess, sysconfig, tempfile, time

folder, arguments = pathlib.Path(os.environ["FAKE_CXX_LOG"]), sys.argv[1:]
target = pathlib.Path(arguments[arguments.index("-o") + 1])

def say(what):
    with open(folder / "log", "a") as log:
        log.write(what + "\\n")

if "c++-header" in arguments:
    say("header begins")
    target.write_text("precompiled")
    say("header ends")
else:
    name = "npu_utils" if target.name.startswith("npu_utils") else "__triton_launcher"
    say(name + " begins")
    if name == "__triton_launcher":
        assert (pathlib.Path(next(a for a in arguments if a.startswith("-I") and list(
            pathlib.Path(a[2:]).glob("precompiled.h.gch")))[2:])).is_dir()
        first = (folder / "log").read_text().count("__triton_launcher begins") == 1
        for _ in range(0 if first else 600):
            if (folder / "log").read_text().count("__triton_launcher begins") >= 3:
                break
            time.sleep(0.1)
        else:
            if not first:
                sys.exit("no second launcher was begun")
    source = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "extension.c"
    source.write_text((folder / "extension.c").read_text().replace("NAME", name))
    include = sysconfig.get_paths()["include"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-I" + include, str(source), "-o", str(target)], check=True)
    say(name + " ends")
"""

_TORCH_NPU = """
import sys, types, torch

version = types.SimpleNamespace(git_version="none")
_C = types.ModuleType("torch_npu._C")
_C._npu_getCurrentRawStream = lambda index: 0
sys.modules["torch_npu._C"] = _C
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch.npu")
module.current_device = lambda: 0
module.set_device = lambda index: None
module.device_count = lambda: 0
module.is_available = lambda: False
torch._register_device_module("npu", module)
"""


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{text}")
    path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process on that machine, whose files are in `folder`."""
    for name, text in (("bisheng", _BISHENG), ("bishengir-compile", _BISHENGIR), ("cxx", _CXX)):
        _program(folder / "bin" / name, text)
    (folder / "extension.c").write_text(_EXTENSION)
    for path, text in (("torch_npu/__init__.py", _TORCH_NPU), ("cann/include/acl/acl.h", "")):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
        "CC": str(folder / "bin" / "cxx"),
        "FAKE_CXX_LOG": str(folder),
        "ASCEND_HOME_PATH": str(folder / "cann"),
        "TRITON_ASCEND_ARCH": "Ascend910B4",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_INTERPRET": "0",
    }


def compiled_so_far(folder: Path) -> list[str]:
    """What the C++ compiler was asked for, in the order of its beginnings and ends."""
    return (folder / "log").read_text().splitlines()
