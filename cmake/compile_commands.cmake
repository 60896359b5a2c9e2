# Editors look for the compiler's commands in the root of the sources: of each file, not of some as one.
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CROSSCOMPILING AND NOT ATTN_EXT_UNITY_BUILD AND NOT CMAKE_UNITY_BUILD)
  # The sources may be read-only: then editors go without.
  add_custom_target(compile_commands ALL
    COMMAND "${CMAKE_COMMAND}" -E copy_if_different
            "${PROJECT_BINARY_DIR}/compile_commands.json" "${PROJECT_SOURCE_DIR}/compile_commands.json" || true)
endif()
