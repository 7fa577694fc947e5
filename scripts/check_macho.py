#!/usr/bin/env python3
"""Whether a file is a program that macOS 14 on Apple silicon starts: scripts/check_macho.py PROGRAM.

Reads what the system's loader reads: the header, the oldest version it runs on, the libraries it asks for, and the
signature, whose hash of every page must fit, or the kernel ends the program. Then the same check looks at copies with
one fault each and must find it: a check that cannot fail is none.
"""
import hashlib
import struct
import sys

VERSION = (14, 0)
LIBRARIES = {
    "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libobjc.A.dylib",
}

# <mach-o/loader.h> and <kern/cs_blobs.h>
MAGIC_64, CPU_ARM64, EXECUTE = 0xFEEDFACF, 0x0100000C, 2
PIE = 0x200000
LOAD_DYLIB, LOAD_WEAK_DYLIB, REEXPORT_DYLIB, LAZY_DYLIB, UPWARD_DYLIB = 0xC, 0x80000018, 0x8000001F, 0x20, 0x80000023
CODE_SIGNATURE, BUILD_VERSION, MAIN = 0x1D, 0x32, 0x80000028
MACOS = 1
SUPER_BLOB, CODE_DIRECTORY, AD_HOC, SHA256 = 0xFADE0CC0, 0xFADE0C02, 0x2, 2


class Fault(Exception):
    pass


def expect(what, want, got):
    if want != got:
        raise Fault(f"{what} must be {want}, got {got}")


def commands(data):
    """Number, offset of each load command."""
    magic, cpu, _, kind, count, size, flags, _ = struct.unpack_from("<8I", data)
    expect("the first word", hex(MAGIC_64), hex(magic))
    expect("the processor", hex(CPU_ARM64), hex(cpu))
    expect("the kind of file", EXECUTE, kind)
    expect("the flag of programs that run at any address", PIE, flags & PIE)
    at, end = 32, 32 + size
    for _ in range(count):
        number, length = struct.unpack_from("<2I", data, at)
        if length < 8 or at + length > end:
            raise Fault(f"a load command must lie before {end}, got {at} + {length}")
        yield number, at
        at += length


def code_directory(data, offset):
    """Where the signature at offset has its list of hashes."""
    magic, _, count = struct.unpack_from(">3I", data, offset)
    expect("the signature's first word", hex(SUPER_BLOB), hex(magic))
    parts = [offset + struct.unpack_from(">2I", data, offset + 12 + 8 * i)[1] for i in range(count)]
    codes = [at for at in parts if struct.unpack_from(">I", data, at)[0] == CODE_DIRECTORY]
    expect("the number of code directories", 1, len(codes))
    return codes[0]


def check_signature(data, offset, size):
    """An ad-hoc one, which needs no certificate, with a hash of each page that fits."""
    expect("the end of the signature", len(data), offset + size)
    at = code_directory(data, offset)
    _, _, _, flags, hashes, _, _, slots, limit = struct.unpack_from(">9I", data, at)
    hash_size, hash_kind, _, page_bits = struct.unpack_from(">4B", data, at + 36)
    expect("the flag of ad-hoc signatures", AD_HOC, flags & AD_HOC)
    expect("the kind of hash", (SHA256, 32), (hash_kind, hash_size))
    expect("what the signature covers", offset, limit)
    page = 1 << page_bits
    expect("the number of hashes", -(-limit // page), slots)
    for slot in range(slots):
        begin = at + hashes + 32 * slot
        if hashlib.sha256(data[slot * page : min((slot + 1) * page, limit)]).digest() != data[begin : begin + 32]:
            raise Fault(f"the hash of page {slot} does not fit")


def check(data):
    """Raises Fault, or returns what was found: offsets by name, and the libraries."""
    at, libraries = {}, []
    try:
        for number, command in commands(data):
            if number in (LOAD_DYLIB, LOAD_WEAK_DYLIB, REEXPORT_DYLIB, LAZY_DYLIB, UPWARD_DYLIB):
                begin = command + struct.unpack_from("<I", data, command + 8)[0]
                libraries.append(data[begin : data.index(b"\0", begin)].decode())
                at["library"] = begin
            elif number in (BUILD_VERSION, CODE_SIGNATURE, MAIN):
                expect(f"how often load command {number:#x} comes", 0, int(number in at))
                at[number] = command
        for number, what in ((BUILD_VERSION, "a version"), (CODE_SIGNATURE, "a signature"), (MAIN, "an entry point")):
            if number not in at:
                raise Fault(f"{what} must be there (load command {number:#x}), got none")
        platform, oldest = struct.unpack_from("<2I", data, at[BUILD_VERSION] + 8)
        expect("the platform", MACOS, platform)
        expect("the oldest macOS", VERSION, (oldest >> 16, oldest >> 8 & 0xFF))
        expect("the libraries", sorted(LIBRARIES), sorted(libraries))
        check_signature(data, *struct.unpack_from("<2I", data, at[CODE_SIGNATURE] + 8))
    except (struct.error, ValueError) as error:
        raise Fault(f"the file ends too early: {error}") from error
    return at, libraries


def sign_again(data, at):
    """The hashes of what lies there now, so that a planted fault is found for itself."""
    offset = struct.unpack_from("<I", data, at[CODE_SIGNATURE] + 8)[0]
    code = code_directory(data, offset)
    hashes, = struct.unpack_from(">I", data, code + 16)
    page = 1 << data[code + 39]
    for slot, begin in enumerate(range(0, offset, page)):
        digest = hashlib.sha256(data[begin : min(begin + page, offset)]).digest()
        data[code + hashes + 32 * slot : code + hashes + 32 * slot + 32] = digest


def plant_faults(data, at):
    signature = struct.unpack_from("<I", data, at[CODE_SIGNATURE] + 8)[0]
    code = code_directory(data, signature)
    word = lambda value: struct.pack("<I", value)
    # name, what to write where, a part of what must be said, whether the hashes are made to fit again
    rows = [
        ("another processor", {4: word(0x01000007)}, "the processor", True),
        ("a library instead of a program", {12: word(6)}, "the kind of file", True),
        ("macOS 15", {at[BUILD_VERSION] + 12: word(15 << 16)}, "the oldest macOS", True),
        ("iOS", {at[BUILD_VERSION] + 8: word(2)}, "the platform", True),
        ("another library", {at["library"] + len("/usr/lib/lib"): b"X"}, "the libraries", True),
        ("no signature", {at[CODE_SIGNATURE]: word(0x29)}, "a signature must be there", False),
        ("no entry point", {at[MAIN]: word(0x29)}, "an entry point must be there", True),
        ("a signature with a certificate", {code + 12: b"\0\0\0\0"}, "ad-hoc", False),
        ("a byte changed in the middle", {signature // 2: bytes([data[signature // 2] ^ 1])}, "does not fit", False),
        ("the last byte before the signature", {signature - 1: bytes([data[signature - 1] ^ 1])}, "does not fit", False),
    ]
    for name, writes, says, again in rows:
        copy = bytearray(data)
        for offset, value in writes.items():
            copy[offset : offset + len(value)] = value
        if again:
            sign_again(copy, at)
        yield name, bytes(copy), says
    yield "half of the file", data[: len(data) // 2], "the end of the signature"
    yield "nothing", b"", "ends too early"


def main():
    if len(sys.argv) != 2:
        sys.exit("check_macho: usage: check_macho.py PROGRAM")
    try:
        with open(sys.argv[1], "rb") as file:
            data = file.read()
        at, libraries = check(data)
    except (OSError, Fault) as fault:
        sys.exit(f"check_macho: {sys.argv[1]}: {fault}")
    found = 0
    for name, copy, says in plant_faults(data, at):
        try:
            check(copy)
        except Fault as fault:
            if says in str(fault):
                found += 1
                continue
            sys.exit(f"check_macho: {name}: must be found as '{says}', got '{fault}'")
        sys.exit(f"check_macho: {name}: passes the check, which therefore proves nothing")
    print(f"check_macho: {sys.argv[1]}: a program for macOS {VERSION[0]}.{VERSION[1]} on arm64, signed ad hoc, needs "
          f"{', '.join(libraries)}; {len(data) / 1e6:.1f} MB; {found} planted faults found")


if __name__ == "__main__":
    main()
