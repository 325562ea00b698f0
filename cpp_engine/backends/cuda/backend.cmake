# What -DPOCKET_BACKEND=cuda adds to the target pocket_engine; included by cpp_engine/CMakeLists.txt.
#
# It takes nvcc 12.4 or newer and cuBLASLt, from the toolkit or from the pip package nvidia-cublas: -DPOCKET_CUBLAS_ROOT names the folder that holds its include
# and lib where they are not found. CMAKE_CUDA_ARCHITECTURES, or the variable CUDAARCHS of the environment, chooses the GPUs; one of them compiles several times as
# fast as all. GPUs newer than Hopper run the code for 89, which the driver translates for them.
# Where NCCL is found too (nccl.h and libnccl.so.2, of the system, or of the pip package nvidia-nccl, or under -DPOCKET_NCCL_ROOT), ranks may share a model.
# The target pocket_cuda_bench is built when it is asked for.
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT "$ENV{CUDAARCHS}" STREQUAL "")
  set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89 90a-real)
endif()
if(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
  find_program(POCKET_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT POCKET_NVCC)
    message(FATAL_ERROR "POCKET_BACKEND=cuda needs nvcc 12.4 or newer, and there is none: install the CUDA toolkit and put its bin folder on PATH, or set CUDACXX to nvcc.")
  endif()
  set(CMAKE_CUDA_COMPILER ${POCKET_NVCC})
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.4 REQUIRED)
set(POCKET_CUBLAS_ROOT "" CACHE PATH "Folder with include/cublasLt.h and lib/libcublasLt.so.*")
set(cublas_roots ${POCKET_CUBLAS_ROOT} ${CUDAToolkit_LIBRARY_ROOT} ${CUDAToolkit_BIN_DIR}/..)
if(Python_EXECUTABLE)  # of the environment that gets the module
  set(Python3_EXECUTABLE ${Python_EXECUTABLE})
endif()
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import nvidia; print(';'.join(p + '/cu13;' + p + '/cublas;' + p + '/nccl' for p in nvidia.__path__))"
                  OUTPUT_VARIABLE packaged OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND cublas_roots ${packaged})
endif()
find_path(POCKET_CUBLAS_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${cublas_roots} PATH_SUFFIXES include)
find_library(POCKET_CUBLASLT NAMES cublasLt libcublasLt.so.13 libcublasLt.so.12 HINTS ${CUDAToolkit_LIBRARY_DIR} ${cublas_roots} PATH_SUFFIXES lib lib64)
if(NOT POCKET_CUBLAS_INCLUDE OR NOT POCKET_CUBLASLT)
  message(FATAL_ERROR "cuBLASLt was not found: pip install nvidia-cublas, or name its folder with -DPOCKET_CUBLAS_ROOT.")
endif()
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu ${CMAKE_CURRENT_LIST_DIR}/*.cpp)
target_sources(pocket_engine PRIVATE ${cuda_sources})
set_target_properties(pocket_engine PROPERTIES CUDA_VISIBILITY_PRESET hidden)
# The common options are the host compiler's own.
get_target_property(common_options pocket_options INTERFACE_COMPILE_OPTIONS)
set_target_properties(pocket_options PROPERTIES INTERFACE_COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CXX>:${common_options}>")
# The dialect as an option: CMake before 3.26 does not know that nvcc has it where nvcc is called through a script.
target_compile_options(pocket_engine PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>")
target_include_directories(pocket_engine SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${POCKET_CUBLAS_INCLUDE})
target_compile_definitions(pocket_engine PUBLIC POCKET_CUDA)
set(POCKET_NCCL_ROOT "" CACHE PATH "Folder with include/nccl.h and lib/libnccl.so.2")
find_path(POCKET_NCCL_INCLUDE nccl.h HINTS ${POCKET_NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS} ${packaged} PATH_SUFFIXES include)
find_library(POCKET_NCCL NAMES nccl libnccl.so.2 HINTS ${POCKET_NCCL_ROOT} ${CUDAToolkit_LIBRARY_DIR} ${packaged} PATH_SUFFIXES lib lib64)
if(POCKET_NCCL_INCLUDE AND POCKET_NCCL)
  target_include_directories(pocket_engine SYSTEM PRIVATE ${POCKET_NCCL_INCLUDE})
  target_compile_definitions(pocket_engine PRIVATE POCKET_NCCL)
  target_link_libraries(pocket_engine PUBLIC ${POCKET_NCCL})
else()
  message(STATUS "NCCL was not found: tensor_parallel_size on GPUs is refused. pip install nvidia-nccl-cu13, or name its folder with -DPOCKET_NCCL_ROOT.")
endif()
string(REPLACE ";" " " architectures "${CMAKE_CUDA_ARCHITECTURES}")
target_compile_definitions(pocket_engine PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:POCKET_CUDA_ARCHITECTURES=\"${architectures}\">")
# Instructions that only code for 90a has, not code for 90.
if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")
  target_compile_definitions(pocket_engine PRIVATE POCKET_HOPPER)
endif()
# The runtime is linked in: beside the driver, only cuBLASLt has to be there where the engine runs, in the folder where it was found or in that of Python's packages.
target_link_libraries(pocket_engine PUBLIC CUDA::cudart_static ${POCKET_CUBLASLT})
get_filename_component(cublas_folder ${POCKET_CUBLASLT} DIRECTORY)
set(POCKET_RPATH ${cublas_folder} "$ORIGIN/nvidia/cu13/lib")
add_executable(pocket_cuda_bench EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/bench/bench.cpp ${CMAKE_CURRENT_LIST_DIR}/bench/load.cpp
               ${CMAKE_CURRENT_LIST_DIR}/bench/synthetic_model.cpp launcher/json_writer.cpp)
target_compile_options(pocket_cuda_bench PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
target_include_directories(pocket_cuda_bench SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${POCKET_CUBLAS_INCLUDE})
target_link_libraries(pocket_cuda_bench PRIVATE pocket_engine)
