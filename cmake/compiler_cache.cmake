# Uses ccache where it is installed. Paths below the folder of the sources count as relative ones, so that copies of
# it share what is compiled, wherever they lie.
find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  get_filename_component(sources "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${sources}" CCACHE_NOHASHDIR=1 "${CCACHE}")
endif()
