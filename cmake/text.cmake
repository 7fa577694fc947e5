# PCRE2 and utf8proc, for tokenizers and chat templates: mlxtape::pcre2 and mlxtape::utf8proc. Neither has a CMake
# package everywhere. Archives are taken before shared libraries: a program then runs where neither is installed.
# Installed with the library too, whose users link with both.
function(mlxtape_find_text name header library package)
  string(TOUPPER MLXTAPE_${name} variable)
  find_path(${variable}_INCLUDE ${header})
  find_library(${variable}_LIBRARY NAMES lib${library}.a ${library})
  mark_as_advanced(${variable}_INCLUDE ${variable}_LIBRARY)
  if(NOT ${variable}_INCLUDE OR NOT ${variable}_LIBRARY)
    message(FATAL_ERROR "mlxtape needs ${name} (${header} and lib${library}.a): install ${package}, or set "
                        "${variable}_INCLUDE and ${variable}_LIBRARY.")
  endif()
  if(NOT TARGET mlxtape::${name})
    add_library(mlxtape::${name} UNKNOWN IMPORTED)
    set_target_properties(mlxtape::${name} PROPERTIES IMPORTED_LOCATION ${${variable}_LIBRARY}
                                                      INTERFACE_INCLUDE_DIRECTORIES ${${variable}_INCLUDE})
  endif()
endfunction()

mlxtape_find_text(pcre2 pcre2.h pcre2-8 libpcre2-dev)
mlxtape_find_text(utf8proc utf8proc.h utf8proc libutf8proc-dev)
