# One line in src/models/architectures/architectures.list is the whole registration of an architecture: from it come its
# source and the list that config.json's model_type is looked up in.
set(architectures_list ${PROJECT_SOURCE_DIR}/src/models/architectures/architectures.list)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${architectures_list})
file(STRINGS ${architectures_list} architecture_names REGEX "^[a-z]")
set(architecture_sources models/architectures/read.cpp)
set(declarations "")
set(calls "")
foreach(name IN LISTS architecture_names)
  list(APPEND architecture_sources models/architectures/${name}.cpp)
  string(APPEND declarations "Architecture architecture_${name}();\n")
  string(APPEND calls "architecture_${name}(), ")
endforeach()
set(MLXTAPE_ARCHITECTURES ${CMAKE_BINARY_DIR}/generated/architectures.cpp)
file(CONFIGURE OUTPUT ${MLXTAPE_ARCHITECTURES} CONTENT
"// Generated from src/models/architectures/architectures.list.
#include \"mlxtape/models/architecture.h\"
namespace mlxtape::models {
${declarations}
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all{${calls}};
  return all;
}
}  // namespace mlxtape::models
")
list(APPEND architecture_sources ${MLXTAPE_ARCHITECTURES})
