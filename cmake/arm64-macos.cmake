# For CMAKE_TOOLCHAIN_FILE: macOS 14 on Apple silicon, built elsewhere with the compiler, C++ library and headers that
# Zig brings. MLXTAPE_MAC_PACKAGES holds bin/ with the compiler and its tools, and root/ with the libraries
# (scripts/mac_link.sh makes both).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
if(NOT MLXTAPE_MAC_PACKAGES OR NOT EXISTS ${MLXTAPE_MAC_PACKAGES}/bin/clang++)
  message(FATAL_ERROR "MLXTAPE_MAC_PACKAGES must be a folder with bin/clang++, got '${MLXTAPE_MAC_PACKAGES}': "
                      "run make mac-link, which makes build/mac-packages and configures with it.")
endif()
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MLXTAPE_MAC_PACKAGES)
set(CMAKE_C_COMPILER ${MLXTAPE_MAC_PACKAGES}/bin/clang)
set(CMAKE_CXX_COMPILER ${MLXTAPE_MAC_PACKAGES}/bin/clang++)
# The system's own ar makes archives whose table of symbols Apple's linkers do not read.
set(CMAKE_AR ${MLXTAPE_MAC_PACKAGES}/bin/ar)
set(CMAKE_RANLIB ${MLXTAPE_MAC_PACKAGES}/bin/ranlib)
# CMake insists on one. It is called for shared libraries that are installed, and there are none.
set(CMAKE_INSTALL_NAME_TOOL install_name_tool)
# The commands in bin/ name the target and its version themselves (-target): CMake adds no option for them.
set(CMAKE_OSX_ARCHITECTURES "" CACHE STRING "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "")
set(CMAKE_OSX_SYSROOT "" CACHE STRING "")

# What is newer than macOS 14 does not compile: neither calls of the system nor parts of the C++ library. Zig's is newer than
# that of a Mac and knows what each version of macOS has, but says so only when asked.
set(CMAKE_C_FLAGS_INIT "-Werror=unguarded-availability")
set(CMAKE_CXX_FLAGS_INIT "-Werror=unguarded-availability -U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1")

# Zig brings the system's library alone. Of the others that the Metal backend uses, cmake/mac lists what there is to link.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-F${CMAKE_CURRENT_LIST_DIR}/mac -L${CMAKE_CURRENT_LIST_DIR}/mac")

set(CMAKE_FIND_ROOT_PATH ${MLXTAPE_MAC_PACKAGES}/root)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
