# cmake -DROOT=<source dir> -DWORK=<scratch dir> -P checks_can_fail.cmake
#
# Plants one fault after the other in a copy of the tree: check_layers and check_tree must accept
# the copy as it is and refuse it with each fault, for the right reason.
cmake_minimum_required(VERSION 3.25)

file(STRINGS ${ROOT}/src/ops/ops.list ops REGEX "^[a-z]")
list(GET ops 0 op)

file(REMOVE_RECURSE ${WORK})
foreach(folder IN ITEMS bench cmake include src tests)
  file(COPY ${ROOT}/${folder} DESTINATION ${WORK})
endforeach()

function(run check out_ok out_text)
  execute_process(COMMAND ${CMAKE_COMMAND} -DROOT=${WORK} -P ${WORK}/cmake/check_${check}.cmake
                  RESULT_VARIABLE status ERROR_VARIABLE text OUTPUT_QUIET)
  string(REGEX REPLACE "[ \n]+" " " text "${text}")  # CMake wraps messages
  if(status EQUAL 0)
    set(${out_ok} TRUE PARENT_SCOPE)
  else()
    set(${out_ok} FALSE PARENT_SCOPE)
  endif()
  set(${out_text} "${text}" PARENT_SCOPE)
endfunction()

foreach(check IN ITEMS layers tree)
  run(${check} ok text)
  if(NOT ok)
    message(FATAL_ERROR "check_${check} refuses the tree before any fault: ${text}")
  endif()
endforeach()

# refuses(check, file, reason, text): check must refuse the tree with text added to file.
function(refuses check file reason planted)
  set(path ${WORK}/${file})
  cmake_path(GET path PARENT_PATH folder)
  set(new_folder TRUE)
  if(EXISTS ${folder})
    set(new_folder FALSE)
  endif()
  set(existed FALSE)
  if(EXISTS ${path})
    set(existed TRUE)
    file(COPY_FILE ${path} ${WORK}/saved)
  endif()
  file(APPEND ${path} "${planted}\n")
  run(${check} ok text)
  if(existed)
    file(RENAME ${WORK}/saved ${path})
  else()
    file(REMOVE ${path})
  endif()
  if(new_folder)
    file(REMOVE_RECURSE ${folder})
  endif()
  string(FIND "${text}" "${reason}" at)
  if(ok)
    message(SEND_ERROR "check_${check} accepts '${planted}' in ${file}")
  elseif(at EQUAL -1)
    message(SEND_ERROR "check_${check} refuses '${planted}' in ${file}, but not because of "
                       "'${reason}': ${text}")
  endif()
endfunction()

set(dir src/ops/${op})
refuses(layers src/core/up.cpp "layer 'core' may not include 'ops'"
        "#include \"mlxtape/ops/${op}.h\"")
refuses(layers src/core/up.cpp "layer 'core' may not include 'ops'"
        "  #  include <mlxtape/ops/${op}.h>")
refuses(layers src/base/up.h "layer 'base' may not include 'core'"
        "#include \"core/memory_kernels.h\"")
refuses(layers include/mlxtape/base/up.h "layer 'base' may not include 'core'"
        "#include \"mlxtape/core/device.h\"")
refuses(layers include/mlxtape/core/private.h "a public header may not include a private one"
        "#include \"core/memory_kernels.h\"")
refuses(layers ${dir}/${op}.cpp "layer 'ops' may not include 'backends'"
        "#include \"backends/cpu/targets.h\"")
refuses(layers ${dir}/${op}.cpp "ask the device for its traits"
        "bool odd(Backend b) { return b == Backend::kCuda; }")
refuses(layers src/models/odd.h "ask the device for its traits" "inline Backend odd() { return Backend::kCpu; }")
refuses(layers ${dir}/${op}.cpu.cpp "a kernel file may not include an op's host functions"
        "#include \"mlxtape/ops/${op}.h\"")
refuses(layers ${dir}/more-inl.h "a kernel file may not include 'cli'"
        "#include \"cli/CMakeLists.txt\"")
refuses(layers src/ops/fictional/fictional.cpp "an op may not include another op's folder"
        "#include \"ops/${op}/${op}_args.h\"")
refuses(layers ${dir}/${op}.cpp "only kernel files may include kernel files"
        "#include \"${op}.cpu.cpp\"")
refuses(layers ${dir}/${op}.cu "a kernel file may include its own backend only"
        "#include \"backends/cpu/device/tasks.h\"")
refuses(layers src/backends/cuda/device.cpp "a backend may not include another backend"
        "#include \"backends/cpu/targets.h\"")
refuses(layers ${dir}/${op}.metal "a kernel file may include its own backend only"
        "#include \"backends/cpu/device/tasks.h\"")
refuses(layers src/backends/metal/device.cpp "the emulator is for tests"
        "#include \"backends/metal/emulator/control.h\"")
refuses(layers ${dir}/${op}.cpp "layer 'ops' may not include 'bench'"
        "#include \"cases/bench_case.h\"")
refuses(layers ${dir}/${op}_bench.cpp "an op's bench file may not include 'tests'"
        "#include \"support/oracle.h\"")
refuses(layers bench/measure.cpp "layer 'bench' may not include 'tests'"
        "#include \"support/oracle.h\"")
refuses(layers src/cli/main.cpp "layer 'cli' may not include 'tests'" "#include \"support/oracle.h\"")
refuses(layers ${dir}/${op}.cpp "without .." "#include \"../${op}/${op}_args.h\"")
refuses(layers ${dir}/${op}.cpp "is not a file of this tree" "#include \"hwy/highway.h\"")
refuses(layers src/extra/extra.cpp "is no layer" "")
refuses(layers ${dir}/${op}.cpp "the umbrella header is for users"
        "#include \"mlxtape/mlxtape.h\"")

string(REPEAT "//\n" 161 long_header)
string(REPEAT "//\n" 801 long_file)
refuses(tree src/ops/ops.list "must be sorted" "aaa")
refuses(tree src/ops/ops.list "zzz.cpu.cpp: missing" "zzz")
refuses(tree src/ops/ops.list "zzz_bench.cpp: missing" "zzz")
refuses(tree src/ops/ops.list "must be snake_case" "zZZ")
refuses(tree src/ops/fictional/fictional.cpp "no line in src/ops/ops.list" "")
refuses(tree include/mlxtape/ops/fictional.h "no line in src/ops/ops.list" "")
refuses(tree include/mlxtape/base/long.h "at most 160" "${long_header}")
refuses(tree src/base/long.cpp "at most 800" "${long_file}")
refuses(tree src/base/error.cpp "a tab" "\tint x;")
refuses(tree src/base/error.cpp "space at the end" "int x; ")
refuses(tree src/base/error.cpp "TODO(#issue)" "// TO${}DO: later")
refuses(tree src/base/error.cpp "TODO(#issue)" "// TO${}DO(me) later")
refuses(tree src/base/error.cpp "absolute path" "// see /ho${}me/me/notes")
refuses(tree src/ops/${op}/${op}.cu "a kernel must begin with wait_turn()"
        "__global__ void planted(Args args) {}")

refuses(tree ${dir}/${op}.cpu.cpp "differ in NaN between processors" "const VF planted = hn::Max(a, b);")
refuses(tree src/ops/scan/scan.cpu.cpp "allows 1 here, got 2" "const VF planted = hn::Min (a, b);")
refuses(tree src/ops/odd-inl.h "allows 0 here, got 1" "const VF planted = hn::Min(\n  a, b);")

file(READ ${WORK}/include/mlxtape/ops/${op}.h header)
string(REPLACE "// Cost " "// Price " without "${header}")
file(WRITE ${WORK}/include/mlxtape/ops/${op}.h "${without}")
refuses(tree include/mlxtape/ops/${op}.h "the entry 'Cost' is missing" "")

file(REMOVE_RECURSE ${WORK})
