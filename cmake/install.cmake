# `cmake --install`: the archive, the public headers, the program, and how CMake and pkg-config find
# them. What the library is made of (Highway, the layers' object libraries, our flags) stays inside:
# a user's build needs threads, PCRE2, utf8proc, a C++20 compiler and, if the library has CUDA kernels, the CUDA
# runtime.
include(CMakePackageConfigHelpers)

install(TARGETS mlxtape EXPORT mlxtapeTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET mlxtape_cli)
  install(TARGETS mlxtape_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mlxtape)
install(EXPORT mlxtapeTargets NAMESPACE mlxtape:: DESTINATION ${package_dir})
configure_package_config_file(cmake/mlxtapeConfig.cmake.in
                              ${CMAKE_BINARY_DIR}/generated/mlxtapeConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/generated/mlxtapeConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)  # before 1.0 a minor version may change the API
install(FILES ${CMAKE_BINARY_DIR}/generated/mlxtapeConfig.cmake
              ${CMAKE_BINARY_DIR}/generated/mlxtapeConfigVersion.cmake
              cmake/text.cmake
        DESTINATION ${package_dir})

# Paths relative to the .pc file itself, so that `--prefix` at installation and a folder moved
# afterwards both stay right.
set(pc_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_libdir ${pc_dir} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH pc_includedir ${pc_dir} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(pc_cuda "")
if(MLXTAPE_WITH_CUDA)
  set(pc_cuda " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/mlxtape.pc @ONLY CONTENT
"libdir=\${pcfiledir}/@pc_libdir@
includedir=\${pcfiledir}/@pc_includedir@

Name: mlxtape
Description: @PROJECT_DESCRIPTION@
Version: @PROJECT_VERSION@
Libs: -L\${libdir} -lmlxtape -lpcre2-8 -lutf8proc@pc_cuda@ -pthread
Cflags: -I\${includedir} -pthread
")
install(FILES ${CMAKE_BINARY_DIR}/generated/mlxtape.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
