# What nothing refers to is left out of programs: of templates and inline functions alone that is 0.6 MB of mlxtape.
if(NOT MLXTAPE_SANITIZE AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  target_link_options(mlxtape_plain_flags INTERFACE $<$<LINK_LANGUAGE:CXX>:-Wl,--gc-sections>)
endif()

# mold or lld where one is there and works: they link faster than the compiler's own.
set(MLXTAPE_LINKER AUTO CACHE STRING "the linker: AUTO (mold, else lld, else the compiler's own), DEFAULT, or a name for -fuse-ld=")
set(fast_linker "")
if(MLXTAPE_LINKER STREQUAL "AUTO")
  # A sanitizer's runtime and what the user chose come first.
  if(NOT MLXTAPE_SANITIZE AND NOT CMAKE_CROSSCOMPILING AND NOT "${CMAKE_CXX_FLAGS} ${CMAKE_EXE_LINKER_FLAGS}" MATCHES "-fuse-ld")
    include(CheckCXXSourceRuns)
    foreach(linker IN ITEMS mold lld)
      set(CMAKE_REQUIRED_LINK_OPTIONS -fuse-ld=${linker} -static-libstdc++ -static-libgcc)
      check_cxx_source_runs(
        "#include <iostream>
         int main() { try { throw 1; } catch (int) { std::cout << 1; } }" MLXTAPE_${linker}_WORKS)
      unset(CMAKE_REQUIRED_LINK_OPTIONS)
      if(MLXTAPE_${linker}_WORKS)
        set(fast_linker ${linker})
        break()
      endif()
    endforeach()
  endif()
elseif(NOT MLXTAPE_LINKER STREQUAL "DEFAULT")
  set(fast_linker ${MLXTAPE_LINKER})
endif()
if(fast_linker)
  target_link_options(mlxtape_plain_flags INTERFACE $<$<LINK_LANGUAGE:CXX>:-fuse-ld=${fast_linker}>)
endif()
