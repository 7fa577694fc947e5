# cmake -DROOT=<tree> -DOUTPUT=<file> [-DCHECK=ON] -P ops_doc.cmake : docs/ops.md from the op headers.
# The header's comment block is the op's contract; the catalogue shows it as it stands.
file(STRINGS ${ROOT}/src/ops/ops.list ops REGEX "^[a-z]")
set(table "")
set(blocks "")
foreach(op IN LISTS ops)
  file(READ ${ROOT}/include/mlxtape/ops/${op}.h header)
  string(FIND "${header}" "#pragma once" end)
  string(SUBSTRING "${header}" 0 ${end} comment)
  string(REGEX REPLACE "(^|\n)// ?" "\\1" comment "${comment}")
  string(STRIP "${comment}" comment)
  string(REGEX MATCH "^[^\n]*(\n[^\n]+)*" summary "${comment}")
  string(REPLACE "\n" " " summary "${summary}")
  string(REGEX REPLACE "^[a-z0-9_]+: *" "" summary "${summary}")
  set(backends "cpu")
  if(header MATCHES "\n// Kernels +none of its own")
    set(backends "all")
  endif()
  foreach(suffix cu metal)
    if(EXISTS ${ROOT}/src/ops/${op}/${op}.${suffix})
      string(APPEND backends ", ${suffix}")
    endif()
  endforeach()
  string(REPLACE ", cu" ", cuda" backends "${backends}")
  string(APPEND table "| [${op}](#${op}) | ${summary} | ${backends} |\n")
  string(APPEND blocks "\n## ${op}\n\n```text\n${comment}\n```\n")
endforeach()
set(text "# Operations

Generated from the headers in include/mlxtape/ops by `make docs`; edit those.

| op | what it does | backends |
|---|---|---|
${table}${blocks}")
if(CHECK)
  file(READ ${OUTPUT} have)
  if(NOT have STREQUAL text)
    message(FATAL_ERROR "${OUTPUT} is not what the headers say: run make docs")
  endif()
else()
  file(WRITE ${OUTPUT} "${text}")
endif()
