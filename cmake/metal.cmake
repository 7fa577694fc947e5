# The Metal backend. On macOS the library has it. On Linux kernels are compiled for an emulator (src/backends/metal/emulator,
# docs/metal.md), which test programs are linked with and the library is not.
#   AUTO      macOS: real. Linux: emulated in test programs
#   ON        real, or the configuration fails
#   EMULATED  Linux: emulated, in the program as well: for trying things out
#   OFF       none
set(MLXTAPE_METAL AUTO CACHE STRING "build the Metal backend: ON, OFF, EMULATED, or AUTO: real on macOS, emulated in tests on Linux")
set_property(CACHE MLXTAPE_METAL PROPERTY STRINGS AUTO ON EMULATED OFF)
set(MLXTAPE_WITH_METAL OFF)        # in the library
set(MLXTAPE_METAL_EMULATED OFF)    # in test programs
set(MLXTAPE_METAL_IN_PROGRAM OFF)  # emulated, in mlxtape itself
set(MLXTAPE_WHY_NO_METAL "it was configured with MLXTAPE_METAL=${MLXTAPE_METAL}")
if(NOT MLXTAPE_METAL MATCHES "^(AUTO|ON|EMULATED|OFF)$")
  message(FATAL_ERROR "MLXTAPE_METAL must be AUTO, ON, EMULATED or OFF, got '${MLXTAPE_METAL}'")
elseif(APPLE)
  if(MLXTAPE_METAL STREQUAL "EMULATED")
    message(FATAL_ERROR "MLXTAPE_METAL=EMULATED is for Linux: here there is the real one. Set it to AUTO.")
  elseif(NOT MLXTAPE_METAL STREQUAL "OFF" AND NOT CMAKE_SYSTEM_PROCESSOR MATCHES "arm64|aarch64")
    set(MLXTAPE_WHY_NO_METAL "it was built for a processor that is not Apple's")
    if(MLXTAPE_METAL STREQUAL "ON")
      message(FATAL_ERROR "MLXTAPE_METAL=ON needs an Apple processor, this is ${CMAKE_SYSTEM_PROCESSOR}")
    endif()
  elseif(NOT MLXTAPE_METAL STREQUAL "OFF")
    set(MLXTAPE_WITH_METAL ON)
  endif()
elseif(MLXTAPE_METAL STREQUAL "ON")
  message(FATAL_ERROR "MLXTAPE_METAL=ON needs macOS. Set it to AUTO, which tests Metal kernels on an emulator, or to EMULATED.")
elseif(NOT MLXTAPE_METAL STREQUAL "OFF")
  set(MLXTAPE_WHY_NO_METAL "it was not built for macOS")
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|aarch64|arm64")
    set(why "the emulator runs on Linux, x86-64 and aarch64")
  elseif(MLXTAPE_SANITIZE)
    # ThreadSanitizer does not know fibers, and the checked kernels define the same functions as the sanitizers' runtimes.
    set(why "the emulator checks accesses itself and cannot be linked with a sanitizer")
  elseif(MLXTAPE_METAL STREQUAL "EMULATED" OR MLXTAPE_BUILD_TESTS)
    set(MLXTAPE_METAL_EMULATED ON)
  else()
    set(why "tests alone use the emulator")
  endif()
  if(MLXTAPE_METAL STREQUAL "EMULATED")
    if(NOT MLXTAPE_METAL_EMULATED)
      message(FATAL_ERROR "MLXTAPE_METAL=EMULATED: ${why}")
    endif()
    set(MLXTAPE_METAL_IN_PROGRAM ON)
  endif()
endif()
if(MLXTAPE_WITH_METAL)
  message(STATUS "Metal backend: yes")
elseif(MLXTAPE_METAL_EMULATED)
  message(STATUS "Metal backend: emulated, in ${MLXTAPE_METAL} builds' test programs")
else()
  message(STATUS "Metal backend: no, ${MLXTAPE_WHY_NO_METAL}")
endif()

# The tool that reads .metal files runs on the machine that builds.
set(metal_bind_sources "")
foreach(part IN ITEMS kernels main rules text tokens)
  list(APPEND metal_bind_sources ${CMAKE_SOURCE_DIR}/src/backends/metal/emulator/bind/${part}.cpp)
endforeach()
if(MLXTAPE_WITH_METAL OR MLXTAPE_METAL_EMULATED)
  if(CMAKE_CROSSCOMPILING)
    find_program(MLXTAPE_BUILD_CXX NAMES c++ g++ clang++ NO_CMAKE_FIND_ROOT_PATH REQUIRED
                 DOC "a C++ compiler for the machine that builds")
    set(MLXTAPE_METAL_BIND ${CMAKE_BINARY_DIR}/metal/metal_bind)
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/metal)
    file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backends/metal/emulator/bind/*.h)
    add_custom_command(OUTPUT ${MLXTAPE_METAL_BIND} VERBATIM DEPENDS ${metal_bind_sources} ${headers}
                       COMMAND ${MLXTAPE_BUILD_CXX} -std=c++20 -O1 -I${CMAKE_SOURCE_DIR}/src ${metal_bind_sources}
                               -o ${MLXTAPE_METAL_BIND})
    add_custom_target(metal_bind DEPENDS ${MLXTAPE_METAL_BIND})  # without a target there is no rule
  else()
    add_executable(metal_bind ${metal_bind_sources})
    target_include_directories(metal_bind PRIVATE ${CMAKE_SOURCE_DIR}/src)
    target_link_libraries(metal_bind PRIVATE mlxtape_plain_flags)
    set(MLXTAPE_METAL_BIND metal_bind)
  endif()
endif()

# metal_text(<file.metal> <out-stem>): the rule for build/metal/<stem>.metal and <stem>.text.cpp, once in a build.
function(metal_text file out)
  cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
  cmake_path(GET file STEM LAST_ONLY stem)
  set(${out} ${stem} PARENT_SCOPE)
  get_property(known GLOBAL PROPERTY MLXTAPE_METAL_FILE_${stem})
  if(known STREQUAL file)
    return()
  elseif(known)
    message(FATAL_ERROR "${file}: its name is taken by ${known}; texts are known by the file's name")
  endif()
  set_property(GLOBAL PROPERTY MLXTAPE_METAL_FILE_${stem} ${file})
  set(made ${CMAKE_BINARY_DIR}/metal/${stem})
  add_custom_command(OUTPUT ${made}.text.cpp BYPRODUCTS ${made}.metal VERBATIM
                     DEPENDS ${file} ${MLXTAPE_METAL_BIND} DEPFILE ${made}.d
                     COMMAND ${MLXTAPE_METAL_BIND} text ${stem} ${file} ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/src
                             ${made}.metal ${made}.text.cpp ${made}.d
                     COMMENT "Reading ${stem}.metal")
endfunction()

# mlxtape_metal_sources(<out-var> <file.metal>...): what a target of this folder compiles for them: the host's half, and the
# text as mlxtape::metal::texts::<stem>, which the host's half knows as MLXTAPE_METAL_TEXT.
function(mlxtape_metal_sources out)
  set(sources "")
  foreach(file IN LISTS ARGN)
    metal_text(${file} stem)
    set_source_files_properties(${file} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++" SKIP_PRECOMPILE_HEADERS ON
                                COMPILE_DEFINITIONS MLXTAPE_METAL_TEXT=${stem})
    set_source_files_properties(${CMAKE_BINARY_DIR}/metal/${stem}.text.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    list(APPEND sources ${file} ${CMAKE_BINARY_DIR}/metal/${stem}.text.cpp)
  endforeach()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# metal_preprocess(<out-var> <stem>): the command that takes macros away, but for the end of its output's name. Metal's own
# headers are empty for it.
set(metal_empty ${CMAKE_BINARY_DIR}/metal/empty)
function(metal_preprocess out stem)
  foreach(header IN ITEMS metal_stdlib metal_simdgroup metal_simdgroup_matrix metal_atomic metal_math metal_integer
                          metal_compute metal_common metal_relational metal_type_traits metal_limits metal_geometric)
    file(CONFIGURE OUTPUT ${metal_empty}/${header} CONTENT "")
  endforeach()
  set(${out} ${CMAKE_CXX_COMPILER} -E -x c++ -std=c++20 -D__METAL_VERSION__=310 -nostdinc -I${metal_empty}
      ${CMAKE_BINARY_DIR}/metal/${stem}.metal -o ${CMAKE_BINARY_DIR}/metal/${stem} PARENT_SCOPE)
endfunction()

# mlxtape_metal_strict(<out-var> <file.metal>...): the texts that scripts/metal_strict.sh reads, as sources of any target of
# this folder.
function(mlxtape_metal_strict out)
  set(texts "")
  foreach(file IN LISTS ARGN)
    metal_text(${file} stem)
    set(made ${CMAKE_BINARY_DIR}/metal/${stem})
    list(APPEND texts ${made}.clcpp)
    get_property(known GLOBAL PROPERTY MLXTAPE_METAL_STRICT_${stem})
    if(NOT known)
      set_property(GLOBAL PROPERTY MLXTAPE_METAL_STRICT_${stem} ON)
      metal_preprocess(preprocess ${stem})
      add_custom_command(OUTPUT ${made}.clcpp BYPRODUCTS ${made}.strict.i VERBATIM DEPENDS ${made}.text.cpp ${MLXTAPE_METAL_BIND}
                         COMMAND ${preprocess}.strict.i
                         COMMAND ${MLXTAPE_METAL_BIND} strict ${made}.strict.i ${made}.clcpp
                         COMMENT "Address spaces of ${stem}.metal")
    endif()
  endforeach()
  set(${out} ${texts} PARENT_SCOPE)
endfunction()

# Kernels for the emulator. Arithmetic as the GPU's: nothing is contracted; memory may be read as another type.
# Large arrays are touched page by page, so that a stack that is too small for them is found.
set(metal_kernel_options -O2 -ffp-contract=off -fno-strict-aliasing -fstack-clash-protection)
set(metal_kernel_warnings -Wno-unused-function -Wno-unused-parameter -Wno-unknown-pragmas)  # of the last to speak
# Each access becomes a call, which src/backends/metal/emulator/check.cpp answers: ThreadSanitizer's own library is not linked.
# A loop must not become a call of memset, which nobody would see.
set(metal_checked_options -fsanitize=thread,alignment,bounds,shift-exponent,integer-divide-by-zero)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND metal_checked_options --param=tsan-instrument-func-entry-exit=0 -fno-tree-loop-distribute-patterns)
else()
  list(APPEND metal_checked_options "SHELL:-mllvm -tsan-instrument-func-entry-exit=0"
                            "SHELL:-mllvm -tsan-instrument-read-before-write=1")
endif()

# mlxtape_metal_kernels(<name> [CHECKED|COUNTED] <file.metal>...): an object library, the kernels as C++ for the emulator. A program is
# linked with one such library and with mlxtape_metal_emulator.
function(mlxtape_metal_kernels name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CHECKED;COUNTED" "" "")
  if(arg_COUNTED)  # checked, and its arithmetic counted
    set(arg_CHECKED ON)
  endif()
  set(sources "")
  set(declared "")
  set(rows "")
  foreach(file IN LISTS arg_UNPARSED_ARGUMENTS)
    metal_text(${file} stem)
    set(made ${CMAKE_BINARY_DIR}/metal/${stem})
    get_property(known GLOBAL PROPERTY MLXTAPE_METAL_KERNELS_${stem})
    if(NOT known)
      set_property(GLOBAL PROPERTY MLXTAPE_METAL_KERNELS_${stem} ON)
      metal_preprocess(preprocess ${stem})
      add_custom_command(OUTPUT ${made}.kernels.cpp BYPRODUCTS ${made}.i VERBATIM DEPENDS ${made}.text.cpp ${MLXTAPE_METAL_BIND}
                         COMMAND ${preprocess}.i
                         COMMAND ${MLXTAPE_METAL_BIND} kernels ${stem} ${made}.i ${made}.metal ${made}.kernels.cpp
                         COMMENT "Binding ${stem}.metal")
    endif()
    if(NOT arg_CHECKED)
      mlxtape_metal_strict(strict ${file})
      set_property(GLOBAL APPEND PROPERTY MLXTAPE_METAL_STRICT_TEXTS ${strict})
      list(APPEND sources ${strict})
    endif()
    list(APPEND sources ${made}.kernels.cpp)
    set_source_files_properties(${made}.kernels.cpp PROPERTIES COMPILE_OPTIONS "${metal_kernel_warnings}")
    string(APPEND declared "namespace files { extern const KernelFile ${stem}; }\n")
    string(APPEND rows "    &files::${stem},\n")
  endforeach()
  set(list ${CMAKE_BINARY_DIR}/metal/${name}.cpp)
  file(CONFIGURE OUTPUT ${list} CONTENT
"// Generated: the files whose kernels a program has.
#include \"backends/metal/emulator/library.h\"
namespace mlxtape::emulator {
${declared}std::span<const KernelFile* const> kernel_files() {
  static constexpr const KernelFile* kFiles[] = {
${rows}  };
  return kFiles;
}
}  // namespace mlxtape::emulator
")
  set(excluded "")
  if(arg_COUNTED)
    set(excluded EXCLUDE_FROM_ALL)
  endif()
  add_library(${name} OBJECT ${excluded} ${sources} ${list})
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE mlxtape_plain_flags)
  target_compile_options(${name} PRIVATE ${metal_kernel_options} $<$<BOOL:${arg_CHECKED}>:${metal_checked_options}>)
  target_compile_definitions(${name} PRIVATE $<$<BOOL:${arg_COUNTED}>:MLXTAPE_COUNTED_KERNELS>)
  set_source_files_properties(${list} PROPERTIES COMPILE_OPTIONS -fno-sanitize=all)
endfunction()
