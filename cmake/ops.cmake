# One line in src/ops/ops.list is the whole registration of an op. From it come the op's sources,
# register_all.cpp, mlxtape/ops.h, the op's tests and its rows in the benchmark and in docs/ops.md.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/ops/ops.list)
file(STRINGS src/ops/ops.list MLXTAPE_OPS REGEX "^[a-z]")
set(MLXTAPE_BACKENDS cpu)
if(MLXTAPE_WITH_CUDA)
  list(APPEND MLXTAPE_BACKENDS cuda)
endif()

set(op_sources "")
set(op_cuda_sources "")
set(op_hopper_sources "")
set(op_benches "")
set(op_tests "")
set(declarations "")
set(entries "")
set(enum_cpu kCpu)
set(enum_cuda kCuda)
foreach(op IN LISTS MLXTAPE_OPS)
  set(folder ${CMAKE_SOURCE_DIR}/src/ops/${op})
  # An op may be spread over files: <op>_<what>.cpp and .cpu.cpp, <op>_<what>.cu; <op>_hopper*.cu has what only
  # compute capability 9.0 can do.
  file(GLOB more CONFIGURE_DEPENDS ${folder}/${op}_*.cpp)
  list(FILTER more EXCLUDE REGEX "_(test|bench)\\.cpp$")
  list(APPEND op_sources ${folder}/${op}.cpp ${more})
  list(APPEND op_benches ${folder}/${op}_bench.cpp)
  file(GLOB tests CONFIGURE_DEPENDS ${folder}/${op}*_test.cpp)
  list(APPEND op_tests ${tests})
  if(NOT EXISTS ${folder}/${op}.cpu.cpp)  # made from what encoders and other ops have
    continue()
  endif()
  list(APPEND op_sources ${folder}/${op}.cpu.cpp)
  if(MLXTAPE_WITH_CUDA)
    file(GLOB more CONFIGURE_DEPENDS ${folder}/${op}_*.cu)
    file(GLOB hopper CONFIGURE_DEPENDS ${folder}/${op}_hopper*.cu)
    list(REMOVE_ITEM more ${hopper})
    list(APPEND op_hopper_sources ${hopper})
    list(APPEND op_cuda_sources ${folder}/${op}.cu ${more})
  endif()
  foreach(backend IN LISTS MLXTAPE_BACKENDS)
    string(APPEND declarations "void register_${op}_${backend}(KernelRegistry& registry);\n")
    string(APPEND entries "      {\"${op}\", Backend::${enum_${backend}}, ops::register_${op}_${backend}},\n")
  endforeach()
endforeach()
set(op_includes "")
foreach(op IN LISTS MLXTAPE_OPS)
  string(APPEND op_includes "#include \"mlxtape/ops/${op}.h\"\n")
endforeach()
set(MLXTAPE_GENERATED_INCLUDE ${CMAKE_BINARY_DIR}/generated/include)
file(CONFIGURE OUTPUT ${MLXTAPE_GENERATED_INCLUDE}/mlxtape/ops.h CONTENT
"// Every op. Generated from src/ops/ops.list.
#pragma once

${op_includes}")
set(device_declarations "")
set(device_calls "")
foreach(backend IN LISTS MLXTAPE_BACKENDS)
  string(APPEND device_declarations
         "namespace ${backend} {\nvoid register_${backend}_devices(std::vector<Device*>& devices,\n"
         "                              std::vector<AbsentDevice>& absent);\n"
         "void register_memory_kernels(KernelRegistry& registry);\n}\n")
  string(APPEND device_calls "  ${backend}::register_${backend}_devices(devices, absent);\n")
  string(APPEND entries "      {\"core\", Backend::${enum_${backend}}, ${backend}::register_memory_kernels},\n")
endforeach()
if(NOT MLXTAPE_WITH_CUDA)
  string(APPEND device_calls "  absent.push_back({Backend::kCuda, \"this build has no CUDA backend: "
         "${MLXTAPE_WHY_NO_CUDA}\"});\n")
endif()
set(MLXTAPE_REGISTER_ALL ${CMAKE_BINARY_DIR}/generated/register_all.cpp)
file(CONFIGURE OUTPUT ${MLXTAPE_REGISTER_ALL} CONTENT
"// Generated from src/ops/ops.list.
#include \"core/op_kernels.h\"
#include \"mlxtape/core/device.h\"
namespace mlxtape {
namespace ops {
${declarations}}  // namespace ops
${device_declarations}
std::span<const OpKernels> op_kernels() {
  static constexpr OpKernels kAll[] = {
${entries}  };
  return kAll;
}

void register_all_devices(std::vector<Device*>& devices, std::vector<AbsentDevice>& absent) {
${device_calls}}
}  // namespace mlxtape
")
