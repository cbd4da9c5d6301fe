# fovea_embed_device_text(target root folder name): the .h and .cuh files of a folder as strings in a generated source of the
# target, written anew when one of them changes. fovea::cuda::jit::embedded_<name>() returns them; a header of the target
# declares it. Kernels include them by their paths below root. Included by CMakeLists it defines the function; run as a script it
# writes the source.

if(CMAKE_SCRIPT_MODE_FILE)
  file(GLOB_RECURSE files LIST_DIRECTORIES false RELATIVE ${ROOT} ${FOLDER}/*.h ${FOLDER}/*.cuh)
  list(SORT files)
  # Raw strings keep the text as it is; clang counts the characters that C++ promises, which every compiler here exceeds.
  set(source "#include <iterator>\n\n#include \"cuda/jit/device_text.hpp\"\n\n#pragma GCC diagnostic ignored \"-Woverlength-strings\"\n\n")
  string(APPEND source "namespace fovea::cuda::jit {\nnamespace {\n\nconstexpr SourceFile kFiles[] = {\n")
  set(digests)
  set(list)
  foreach(file IN LISTS files)
    file(SHA256 ${ROOT}/${file} digest)
    string(APPEND digests "${file} ${digest}\n")
    string(REGEX REPLACE "(..)" "0x\\1, " bytes "${digest}")
    string(APPEND list "    {${bytes}},\n")
    file(READ ${ROOT}/${file} text)
    string(FIND "${text}" ")embedded\"" end)
    if(NOT end EQUAL -1)
      message(FATAL_ERROR "${file} holds the delimiter of the string that it is embedded in")
    endif()
    string(APPEND source "    {\"${file}\", R\"embedded(${text})embedded\"},\n")
  endforeach()
  string(APPEND source "};\n\nconstexpr Sha256 kDigests[] = {\n${list}};\n\n")
  string(APPEND source "}  // namespace\n\nconst DeviceText& embedded_${NAME}() {\n")
  # Here and not at run time, where a kernel from the disk cache would wait for it.
  string(SHA256 digest "${digests}")
  string(REGEX REPLACE "(..)" "0x\\1, " digest "${digest}")
  string(APPEND source "  static const DeviceText text{kFiles, {std::begin(kDigests), std::end(kDigests)}, {${digest}}};\n  return text;\n}\n\n")
  string(APPEND source "}  // namespace fovea::cuda::jit\n")
  file(WRITE ${OUT} "${source}")
  return()
endif()

set(FOVEA_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})

function(fovea_embed_device_text target root folder name)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS ${folder}/*.h ${folder}/*.cuh)
  set(out ${PROJECT_BINARY_DIR}/embedded/${name}.cpp)
  add_custom_command(
    OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DROOT=${root} -DFOLDER=${folder} -DNAME=${name} -DOUT=${out} -P ${FOVEA_EMBED_SCRIPT}
    DEPENDS ${files} ${FOVEA_EMBED_SCRIPT}
    COMMENT "Embedding device text"
    VERBATIM)
  target_sources(${target} PRIVATE ${out})
endfunction()
