"""The library's own declarations of XLA's C structs, against the headers of the jaxlib that is installed."""

import pathlib
import re
import shutil
import subprocess

import pytest

jax = pytest.importorskip("jax")

SOURCES = pathlib.Path(__file__).resolve().parents[3]
FRAME = SOURCES / "src" / "ffi" / "xla" / "frame.hpp"

# Ours: XLA's, and members by their names there.
STRUCTS = {
    "Extension": ("XLA_FFI_Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "Version": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "Metadata": ("XLA_FFI_Metadata", {"struct_size": "struct_size", "version": "api_version", "traits": "traits"}),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    "Buffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "Buffers": ("XLA_FFI_Args", {"size": "size", "types": "types", "buffers": "args"}),
    "Span": ("XLA_FFI_ByteSpan", {"data": "ptr", "size": "len"}),
    "Attributes": ("XLA_FFI_Attrs", {"size": "size", "types": "types", "names": "names", "values": "attrs"}),
    "ErrorCreate": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "ErrorDestroy": ("XLA_FFI_Error_Destroy_Args", {"error": "error"}),
    "StreamGet": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "MemoryAllocate": (
        "XLA_FFI_DeviceMemory_Allocate_Args", {"context": "ctx", "size": "size", "alignment": "alignment", "data": "data"},
    ),
    "MemoryFree": ("XLA_FFI_DeviceMemory_Free_Args", {"context": "ctx", "size": "size", "data": "data"}),
    "DeviceOrdinalGet": ("XLA_FFI_DeviceOrdinal_Get_Args", {"context": "ctx", "ordinal": "device_ordinal"}),
    "Api": (
        "XLA_FFI_Api",
        {
            "version": "api_version", "error_create": "XLA_FFI_Error_Create", "error_destroy": "XLA_FFI_Error_Destroy",
            "stream_get": "XLA_FFI_Stream_Get", "memory_allocate": "XLA_FFI_DeviceMemory_Allocate",
            "memory_free": "XLA_FFI_DeviceMemory_Free", "device_ordinal_get": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "Frame": (
        "XLA_FFI_CallFrame",
        {
            "extensions": "extension_start", "api": "api", "context": "ctx", "stage": "stage", "operands": "args", "results": "rets",
            "attributes": "attrs",
        },
    ),
}  # fmt: skip

NUMBERS = {
    "kMetadataExtension": "XLA_FFI_Extension_Metadata", "kMajorVersion": "XLA_FFI_API_MAJOR", "kBuffer": "XLA_FFI_ArgType_BUFFER",
    "kString": "XLA_FFI_AttrType_STRING", "Stage::execute": "XLA_FFI_ExecutionStage_EXECUTE",
    "ErrorCode::invalid_argument": "XLA_FFI_Error_Code_INVALID_ARGUMENT", "ErrorCode::unimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "ErrorCode::failed_precondition": "XLA_FFI_Error_Code_FAILED_PRECONDITION",
    "ErrorCode::unavailable": "XLA_FFI_Error_Code_UNAVAILABLE", "ErrorCode::internal": "XLA_FFI_Error_Code_INTERNAL",
}  # fmt: skip
NUMBERS |= {f"ElementType::{name}": f"XLA_FFI_DataType_{name.upper()}" for name in "pred s8 s32 s64 u8 u32 f16 f32 bf16 f8e4m3fn".split()}


def compiled(tmp_path: pathlib.Path, frame: str) -> subprocess.CompletedProcess:
    compiler = shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "frame.hpp").write_text(frame)
    lines = ["#include <cstddef>", '#include "xla/ffi/api/c_api.h"', '#include "frame.hpp"', "using namespace fovea::ffi::xla;"]
    for ours, (theirs, members) in STRUCTS.items():
        lines += [f"static_assert(offsetof({ours}, {own}) == offsetof({theirs}, {other}));" for own, other in members.items()]
        lines += [f"static_assert(sizeof({ours}::{own}) == sizeof({theirs}::{other}));" for own, other in members.items()]
        # Later versions append to what XLA makes; what it reads of ours has a size of its own.
        lines += [f"static_assert(sizeof({ours}) <= sizeof({theirs}));"]
    lines += [f"static_assert(static_cast<int>({own}) == {other});" for own, other in NUMBERS.items()]
    lines += ["static_assert(kMinorVersion <= XLA_FFI_API_MINOR);"]
    (tmp_path / "same.cpp").write_text("\n".join(lines) + "\n")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", f"-I{jax.ffi.include_dir()}", f"-I{tmp_path}", str(tmp_path / "same.cpp")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(not FRAME.exists(), reason="the sources are not beside these tests")
def test_declarations_are_xlas(tmp_path: pathlib.Path, route: str) -> None:
    if route == "ctypes":
        pytest.skip("no call is made")
    frame = FRAME.read_text()
    done = compiled(tmp_path, frame)
    assert done.returncode == 0, done.stderr
    # A member that is missing would be seen.
    moved = re.sub(r"  void\* execution_context_get;\n", "", frame)
    assert moved != frame and compiled(tmp_path, moved).returncode != 0
