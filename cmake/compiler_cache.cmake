# Uses ccache where it is installed. Paths below the folder of the sources count as relative ones, so that copies of
# it share what is compiled, wherever they lie. `env` has the same path in every build, which CMake, in an environment
# of pip's, has not: another command would compile everything again.
find_program(CCACHE ccache)
find_program(ENV_COMMAND env)
if(CCACHE AND ENV_COMMAND AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  get_filename_component(sources "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${ENV_COMMAND}" "CCACHE_BASEDIR=${sources}" CCACHE_NOHASHDIR=1 "${CCACHE}")
endif()
