# Flags of every target: mlxtape_flags, or mlxtape_plain_flags, the same without the instrumentation of sanitizers, for what
# is not being watched by them. Sums must not depend on what the compiler likes to contract, so fused multiply-add is
# written where it is meant, never guessed.
add_library(mlxtape_plain_flags INTERFACE)
add_library(mlxtape_flags INTERFACE)
target_link_libraries(mlxtape_flags INTERFACE mlxtape_plain_flags)
target_compile_options(mlxtape_plain_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-ffp-contract=off>)
if(MLXTAPE_WERROR)
  target_compile_options(mlxtape_plain_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# Kernels are compiled with -O3: their loops over registers must be unrolled. The rest, which waits for them, is not: a command
# and a test compiled in 85 and 89 % of the time with -O2. Another level that was asked for is everybody's.
set(kernel_options "")
if(CMAKE_CXX_FLAGS_RELEASE MATCHES "-O3")
  string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
  set(kernel_options $<$<CONFIG:Release>:-O3>)
endif()
# g++ 12 and 13 see overlapping copies inside "text" + std::string, and with -O2 copies past the end, where there are none.
set(host_options "")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  target_compile_options(mlxtape_plain_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  set(host_options -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
endif()
# The floor of what the library runs on; the kernels choose better instructions at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(mlxtape_plain_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
  # Three instruction sets are enough: the floor (Highway calls it SSSE3), AVX2 and AVX-512. With
  # sanitizers two are: AVX2 shares its code paths with the floor, and a kernel file takes minutes.
  # Threads meet in the same way on every one: for ThreadSanitizer the floor alone.
  if(MLXTAPE_SANITIZE STREQUAL "thread")
    target_compile_definitions(mlxtape_plain_flags INTERFACE HWY_DISABLED_TARGETS=HWY_SSE4 HWY_COMPILE_ONLY_STATIC)
  elseif(MLXTAPE_SANITIZE)
    target_compile_definitions(mlxtape_plain_flags INTERFACE "HWY_DISABLED_TARGETS=(HWY_SSE4|HWY_AVX2)")
  else()
    target_compile_definitions(mlxtape_plain_flags INTERFACE HWY_DISABLED_TARGETS=HWY_SSE4)
  endif()
endif()
# SVE and SVE2 are left out: a vector whose length is not known to the compiler can be no member of a struct, and
# the kernels keep vectors in structs and arrays. NEON is what every 64-bit ARM has, and all that Apple's have.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  target_compile_definitions(mlxtape_plain_flags INTERFACE
    "HWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
  # Highway compiles kernels with these options; g++ inlines nothing of them into a constructor that it makes itself,
  # which has the file's options. Instructions of AES are used by name alone, and no kernel names one.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(mlxtape_plain_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=armv8-a+crypto>)
  endif()
endif()
if(MLXTAPE_SANITIZE)
  string(REPLACE ";" "," sanitizers "${MLXTAPE_SANITIZE}")
  target_compile_options(mlxtape_flags INTERFACE -fsanitize=${sanitizers} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer -g1)
  target_link_options(mlxtape_plain_flags INTERFACE -fsanitize=${sanitizers})
elseif(NOT APPLE)  # where libc++ is part of the system
  # A program then needs libc alone and starts on machines with other system libraries.
  target_link_options(mlxtape_plain_flags INTERFACE -static-libstdc++ -static-libgcc)
endif()
# No kernel may have a stack frame: what is spilled there costs more than it spares.
target_compile_options(mlxtape_plain_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xptxas=-warn-lmem-usage,-warn-spills,-Werror>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>"
  # Machine code is compressed as PTX is, several times; the driver unpacks a file's code when its first kernel runs, which
  # those of CUDA 12.4 and later can. "size" would save a quarter more and take 45 times as long to make.
  "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=balance;-Xfatbin=-compress-all>")

# Whether a pointer is null or aligned is asked at every load and store, for a third of the time that a kernel takes to
# compile with AddressSanitizer. So kernels are asked with ThreadSanitizer, which has one instruction set. An empty tensor
# has no memory, and Clang calls every step from there an overflow, read or not: what is read is AddressSanitizer's.
set(kernel_sanitizers "")
if(MLXTAPE_SANITIZE STREQUAL "thread")
  set(kernel_sanitizers -fsanitize=null,alignment -fsanitize-undefined-trap-on-error)
elseif(MLXTAPE_SANITIZE MATCHES "undefined")
  # An access is checked by a call, not by code of its own: half of the time to compile. -O1: what -O0 makes of vectors runs
  # a hundred times as long.
  set(kernel_sanitizers -O1 -fno-sanitize=null,alignment,pointer-overflow -fsanitize-address-outline-instrumentation)
endif()
# Of what only arranges work for others: it compiles in half of the time. With it, tests of operations would take twice as
# long for the conversions of numbers in base, and those of units five times as long for what they compute in double.
set(quick_options "")
if(MLXTAPE_SANITIZE STREQUAL "address;undefined")
  set(quick_options -O0)
endif()
set(kernel_files "\\.cpu\\.cpp$|(^|/)backends/cpu/[a-z]*_(into|kernels)\\.cpp$")

# mlxtape_sources(<file>...): options of a layer's sources, by whether they are CPU kernels.
function(mlxtape_sources)
  foreach(file IN LISTS ARGV)
    if(file MATCHES "${kernel_files}")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${kernel_options};${kernel_sanitizers}"
                                                     SKIP_PRECOMPILE_HEADERS ON)
    elseif(file MATCHES "\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${host_options}")
    endif()
  endforeach()
endfunction()

# mlxtape_precompile(<target> [FROM <target>] [<header>...]): the headers that most of its files include,
# parsed once; or those of another target that is compiled with the same flags. With ccache the caller
# sets CCACHE_SLOPPINESS=pch_defines,time_macros, or nothing is cached.
function(mlxtape_precompile target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "FROM" "")
  if(arg_FROM)
    target_precompile_headers(${target} REUSE_FROM ${arg_FROM})
  else()
    string(REPLACE ">" "$<ANGLE-R>" headers "${arg_UNPARSED_ARGUMENTS}")
    target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${headers}>")
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endfunction()
set(MLXTAPE_STD_HEADERS <algorithm> <array> <atomic> <cmath> <filesystem> <functional> <map> <memory> <numeric>
                        <optional> <span> <string> <vector>)

# Apple's C++ library reads integers with std::from_chars, but not every version of it reads a double so.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS "${CMAKE_CXX20_STANDARD_COMPILE_OPTION}")
check_cxx_source_compiles("
#include <charconv>
int main() {
  double value = 0;
  const char text[] = \"1.5\";
  return std::from_chars(text, text + 3, value).ptr == text + 3 ? 0 : 1;
}" MLXTAPE_FROM_CHARS_OF_DOUBLE)
unset(CMAKE_REQUIRED_FLAGS)
