# Flags of every target. Sums must not depend on what the compiler likes to contract, so fused
# multiply-add is written where it is meant, never guessed.
add_library(mlxtape_flags INTERFACE)
target_compile_options(mlxtape_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-ffp-contract=off>)
if(MLXTAPE_WERROR)
  target_compile_options(mlxtape_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# g++ 12 sees overlapping copies inside "text" + std::string, where there are none.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(mlxtape_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# The floor of what the library runs on; the kernels choose better instructions at run time.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(mlxtape_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
  # Three instruction sets are enough: the floor (Highway calls it SSSE3), AVX2 and AVX-512. With
  # sanitizers two are: AVX2 shares its code paths with the floor, and a kernel file takes minutes.
  if(MLXTAPE_SANITIZE)
    target_compile_definitions(mlxtape_flags INTERFACE "HWY_DISABLED_TARGETS=(HWY_SSE4|HWY_AVX2)")
  else()
    target_compile_definitions(mlxtape_flags INTERFACE HWY_DISABLED_TARGETS=HWY_SSE4)
  endif()
endif()
if(MLXTAPE_SANITIZE)
  string(REPLACE ";" "," sanitizers "${MLXTAPE_SANITIZE}")
  target_compile_options(mlxtape_flags INTERFACE -fsanitize=${sanitizers} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer -g1)
  target_link_options(mlxtape_flags INTERFACE -fsanitize=${sanitizers})
else()
  # A program then needs libc alone and starts on machines with other system libraries.
  target_link_options(mlxtape_flags INTERFACE -static-libstdc++ -static-libgcc)
endif()
# No kernel may have a stack frame: what is spilled there costs more than it spares.
target_compile_options(mlxtape_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xptxas=-warn-lmem-usage,-warn-spills,-Werror>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
