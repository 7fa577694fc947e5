# cmake -DROOT=<source dir> -P check_tree.cmake : the rules about files that no compiler checks.
cmake_minimum_required(VERSION 3.25)

set(header_entries Formula Gradient Layout Types Cost Limits)
set(max_lines 800)
set(max_header_lines 160)  # of a public header

# pattern ; what to say. Not for this file, which must name them.
set(forbidden
    "[^A-Za-z0-9_.}]/(home|root|Users|mnt|workspace)/" "an absolute path of somebody's machine"
    "TODO($|[^(])|TODO\\([^#]" "write TODO(#issue) or nothing"
    "(^|[^A-Za-z0-9_])(FIXME|XXX|HACK)([^A-Za-z0-9_]|$)" "write TODO(#issue) or nothing"
    "\n(<<<<<<<|=======|>>>>>>>)[ \n]" "a merge that was not finished"
    "[Cc]o-[Aa]uthored-[Bb]y|[Gg]enerated with " "authorship belongs in the commit")

# hn::Max and hn::Min make of NaN what the processor makes of it, so kernels call not_below, not_above and largest
# (src/backends/cpu/device/simd-inl.h). How often each file may call them all the same, and why it may.
set(raw_extremes_in_simd 3)  # what the three are made of
set(raw_extremes_of_integers
    src/backends/cpu/device/threefry-inl.h 1
    src/ops/scan/scan.cpu.cpp 1
    src/ops/sort/sort_argmax.cpu.cpp 3
    src/ops/sort/sort_select.cpu.cpp 3)
set(raw_extremes_without_nan  # or where NaN is seen to beside them
    src/ops/moe_route/moe_route.cpu.cpp 2
    src/ops/moe_route/moe_route_choose-inl.h 2
    src/ops/quantize/quantize.cpu.cpp 3
    src/ops/random/random.cpu.cpp 2
    src/ops/sample/sample_passes-inl.h 1)
set(raw_extremes src/backends/cpu/device/simd-inl.h ${raw_extremes_in_simd}
    ${raw_extremes_of_integers} ${raw_extremes_without_nan})

# ---- ops: the list, the folders, the headers ----

file(STRINGS ${ROOT}/src/ops/ops.list ops REGEX "^[^#]")
set(sorted ${ops})
list(SORT sorted)
list(REMOVE_DUPLICATES sorted)
if(NOT ops STREQUAL sorted)
  message(SEND_ERROR "src/ops/ops.list: must be sorted, each op once")
endif()
foreach(op IN LISTS ops)
  if(NOT op MATCHES "^[a-z][a-z0-9_]*$")
    message(SEND_ERROR "src/ops/ops.list: '${op}' must be snake_case")
    continue()
  endif()
  set(header include/mlxtape/ops/${op}.h)
  set(op_files ${header} src/ops/${op}/${op}.cpp src/ops/${op}/${op}_test.cpp
      src/ops/${op}/${op}_bench.cpp)
  set(text "")
  if(EXISTS ${ROOT}/${header})
    file(READ ${ROOT}/${header} text)
  endif()
  if(NOT text MATCHES "\n// Kernels +none of its own")
    list(APPEND op_files src/ops/${op}/${op}_args.h src/ops/${op}/${op}.cpu.cpp)
  endif()
  foreach(file IN LISTS op_files)
    if(NOT EXISTS ${ROOT}/${file})
      message(SEND_ERROR "${file}: missing, and ${op} is in ops.list")
    endif()
  endforeach()
  if(EXISTS ${ROOT}/${header})
    foreach(entry IN LISTS header_entries)
      if(NOT text MATCHES "\n// ${entry} +[^ \n]")
        message(SEND_ERROR "${header}: the entry '${entry}' is missing")
      endif()
    endforeach()
  endif()
endforeach()
file(GLOB folders RELATIVE ${ROOT}/src/ops LIST_DIRECTORIES true ${ROOT}/src/ops/*)
file(GLOB headers RELATIVE ${ROOT}/include/mlxtape/ops ${ROOT}/include/mlxtape/ops/*.h)
list(TRANSFORM headers REPLACE "\\.h$" "")
foreach(name IN LISTS folders headers)
  if((IS_DIRECTORY ${ROOT}/src/ops/${name} OR name IN_LIST headers) AND NOT name IN_LIST ops)
    message(SEND_ERROR "ops: ${name} has a folder or header but no line in src/ops/ops.list")
  endif()
endforeach()

# ---- every text file ----

function(complain file text pattern what)
  string(REGEX MATCH "${pattern}" found "${text}")
  string(FIND "${text}" "${found}" at)
  string(SUBSTRING "${text}" 0 ${at} before)
  string(REGEX MATCHALL "\n" breaks "${before}")
  list(LENGTH breaks line)
  math(EXPR line "${line} + 1")
  message(SEND_ERROR "${file}:${line}: ${what}")
endfunction()

file(GLOB files RELATIVE ${ROOT} ${ROOT}/* ${ROOT}/.clang* ${ROOT}/.editorconfig ${ROOT}/.ci/*)
foreach(folder IN ITEMS include src tests bench cmake scripts examples docs lab)
  file(GLOB_RECURSE more RELATIVE ${ROOT} ${ROOT}/${folder}/*)
  list(APPEND files ${more})
endforeach()
list(FILTER files INCLUDE REGEX
     "\\.(h|cpp|cu|cuh|mm|metal|cmake|in|list|py|sh|md|txt|json)$|^(Makefile|\\.[a-z-]+|\\.ci/.*)$")
# Left out: what programs write, mlx-lm's own files among it.
list(FILTER files EXCLUDE REGEX "^(bench/results/|tests/parity/golden(_jobs)?/|CMakeUserPresets)|/__pycache__/")
set(seen 0)
foreach(file IN LISTS files)
  if(IS_DIRECTORY ${ROOT}/${file} OR file STREQUAL "cmake/check_tree.cmake")
    continue()
  endif()
  math(EXPR seen "${seen} + 1")
  file(READ ${ROOT}/${file} text)
  # Brackets and semicolons would be read as list syntax further down.
  string(REGEX REPLACE "[][;\\\\]" "|" text "${text}")

  string(REGEX MATCHALL "\n" breaks "${text}")
  list(LENGTH breaks lines)
  if(file MATCHES "\\.(h|cpp|cu|cuh|mm|metal|cmake|py|sh)$" AND lines GREATER max_lines)
    message(SEND_ERROR "${file}: ${lines} lines, at most ${max_lines}")
  endif()
  if(file MATCHES "^include/" AND lines GREATER max_header_lines)
    message(SEND_ERROR "${file}: ${lines} lines, at most ${max_header_lines} in a public header")
  endif()
  if(NOT file STREQUAL "Makefile" AND text MATCHES "\t")
    complain(${file} "${text}" "\t" "a tab")
  endif()
  if(text MATCHES "[ \t\r]\n")
    complain(${file} "${text}" "[ \t\r]\n" "space at the end of the line")
  endif()
  if(NOT text STREQUAL "" AND NOT text MATCHES "\n$")
    message(SEND_ERROR "${file}: the last line has no end")
  endif()
  # Kernels are launched before the one before has ended (backends/cuda/device/launch.cuh).
  if(file MATCHES "^src/.*\\.cuh?$")
    string(REPLACE "__global__" ";" kernels "${text}")
    list(POP_FRONT kernels)
    foreach(kernel IN LISTS kernels)
      if(NOT kernel MATCHES "wait_turn\\(\\)")
        string(REGEX MATCH "[a-z_]+\\([A-Z][A-Za-z]*[ *]" name "${kernel}")
        message(SEND_ERROR "${file}: a kernel must begin with wait_turn(), got ${name}...")
      endif()
    endforeach()
  endif()
  if(file MATCHES "^src/.*\\.(h|cpp)$")
    string(REGEX MATCHALL "hn::(Max|Min)[ \n]*\\(" calls "${text}")
    list(LENGTH calls count)
    set(allowed 0)
    list(FIND raw_extremes ${file} at)
    if(NOT at EQUAL -1)
      math(EXPR at "${at} + 1")
      list(GET raw_extremes ${at} allowed)
    endif()
    if(NOT count EQUAL allowed)
      message(SEND_ERROR "${file}: hn::Max and hn::Min differ in NaN between processors: call not_below, not_above or "
                         "largest; of integers, list it in cmake/check_tree.cmake, which allows ${allowed} here, got ${count}")
    endif()
  endif()
  set(rules ${forbidden})
  while(rules)
    list(POP_FRONT rules pattern what)
    if(text MATCHES "${pattern}")
      complain(${file} "${text}" "${pattern}" "${what}")
    endif()
  endwhile()
endforeach()
if(seen EQUAL 0)
  message(SEND_ERROR "no file found under ${ROOT}")
endif()
