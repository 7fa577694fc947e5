# cmake -DSOURCE=<tree> -DOUTPUT=<header> -P commit.cmake : writes the header only when it changes.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT commit)
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define MLXTAPE_COMMIT \"${commit}\"\n")
