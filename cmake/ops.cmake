# One line in src/ops/ops.list is the whole registration of an op. From it come the op's sources,
# register_all.cpp, mlxtape/ops.h, the op's tests and its rows in the benchmark and in docs/ops.md.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/ops/ops.list)
file(STRINGS src/ops/ops.list MLXTAPE_OPS REGEX "^[a-z]")
set(MLXTAPE_BACKENDS cpu)
if(MLXTAPE_WITH_CUDA)
  list(APPEND MLXTAPE_BACKENDS cuda)
endif()
if(MLXTAPE_WITH_METAL)
  list(APPEND MLXTAPE_BACKENDS metal)
endif()

set(op_sources "")
set(op_cuda_sources "")
set(op_hopper_sources "")
set(op_metal_sources "")
set(op_benches "")
set(op_tests "")
set(op_metal_tests "")  # those of op_tests whose op has kernels for Metal
set(enum_cpu kCpu)
set(enum_cuda kCuda)
set(enum_metal kMetal)
foreach(op IN LISTS MLXTAPE_OPS)
  set(folder ${CMAKE_SOURCE_DIR}/src/ops/${op})
  set(ops_of_${op} "")  # the backends that have its kernels
  # An op may be spread over files: <op>_<what>.cpp and .cpu.cpp, <op>_<what>.cu, <op>_<what>.metal; <op>_hopper*.cu has
  # what only compute capability 9.0 can do.
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
  list(APPEND ops_of_${op} cpu)
  list(APPEND ops_of_${op} cuda)
  if(MLXTAPE_WITH_CUDA)
    file(GLOB more CONFIGURE_DEPENDS ${folder}/${op}_*.cu)
    file(GLOB hopper CONFIGURE_DEPENDS ${folder}/${op}_hopper*.cu)
    list(REMOVE_ITEM more ${hopper})
    list(APPEND op_hopper_sources ${hopper})
    list(APPEND op_cuda_sources ${folder}/${op}.cu ${more})
  endif()
  file(GLOB metal CONFIGURE_DEPENDS ${folder}/${op}.metal ${folder}/${op}_*.metal)
  if(metal)
    list(APPEND ops_of_${op} metal)
    list(APPEND op_metal_sources ${metal})
    list(APPEND op_metal_tests ${tests})
  endif()
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

# mlxtape_register_all(<file> <backend>...): what a program with these backends has.
function(mlxtape_register_all file)
  set(declarations "")
  set(entries "")
  set(device_declarations "")
  set(device_calls "")
  foreach(op IN LISTS MLXTAPE_OPS)
    foreach(backend IN LISTS ARGN)
      if(backend IN_LIST ops_of_${op})
        string(APPEND declarations "void register_${op}_${backend}(KernelRegistry& registry);\n")
        string(APPEND entries "      {\"${op}\", Backend::${enum_${backend}}, ops::register_${op}_${backend}},\n")
      endif()
    endforeach()
  endforeach()
  foreach(backend IN LISTS ARGN)
    string(APPEND device_declarations
           "namespace ${backend} {\nvoid register_${backend}_devices(std::vector<Device*>& devices,\n"
           "                              std::vector<AbsentDevice>& absent);\n"
           "void register_memory_kernels(KernelRegistry& registry);\n}\n")
    string(APPEND device_calls "  ${backend}::register_${backend}_devices(devices, absent);\n")
    string(APPEND entries "      {\"core\", Backend::${enum_${backend}}, ${backend}::register_memory_kernels},\n")
  endforeach()
  if(NOT cuda IN_LIST ARGN)
    string(APPEND device_calls "  absent.push_back({Backend::kCuda, \"this build has no CUDA backend: "
           "${MLXTAPE_WHY_NO_CUDA}\"});\n")
  endif()
  if(NOT metal IN_LIST ARGN)
    string(APPEND device_calls "  absent.push_back({Backend::kMetal, \"this build has no Metal backend: "
           "${MLXTAPE_WHY_NO_METAL}\"});\n")
  endif()
  file(CONFIGURE OUTPUT ${file} CONTENT
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
endfunction()
set(MLXTAPE_REGISTER_ALL ${CMAKE_BINARY_DIR}/generated/register_all.cpp)
mlxtape_register_all(${MLXTAPE_REGISTER_ALL} ${MLXTAPE_BACKENDS})
# The same with the emulated device, for programs that are linked with it and with the library, whose own is then not used.
if(MLXTAPE_METAL_EMULATED)
  set(MLXTAPE_REGISTER_ALL_METAL ${CMAKE_BINARY_DIR}/generated/register_all_metal.cpp)
  mlxtape_register_all(${MLXTAPE_REGISTER_ALL_METAL} ${MLXTAPE_BACKENDS} metal)
endif()
