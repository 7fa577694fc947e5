# With the CUDA backend the program runs on machines with and without a GPU: the runtime is linked in
# and looks for a driver when it is first asked.
option(MLXTAPE_CUDA "build the CUDA backend; needs nvcc" OFF)
if(MLXTAPE_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90)  # machine code for H100 and H200, and PTX for what comes after
  endif()
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc can
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit 12.4 REQUIRED)
endif()
