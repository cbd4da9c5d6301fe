# fovea_module(name LINK ...): src/<name>/ as a static library of its own, so that its tests link what it may know and no more.
# fovea_library(modules...): the shipped library, made of the modules' objects; fovea::fovea is the kind that BUILD_SHARED_LIBS names.

function(fovea_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
  # Messages name src/..., wherever the library was built.
  target_compile_options(${target} PRIVATE -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
  if(FOVEA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

function(fovea_module name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${name}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/src/cuda/emulator/")  # a library of the tests
  if(NOT sources)
    add_library(fovea_${name} INTERFACE)
    target_link_libraries(fovea_${name} INTERFACE ${ARG_LINK})
    return()
  endif()
  add_library(fovea_${name} STATIC ${sources})
  target_include_directories(fovea_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(fovea_${name} PUBLIC ${ARG_LINK})
  fovea_warnings(fovea_${name})
endfunction()

function(fovea_library)
  set(objects)
  foreach(module IN LISTS ARGN)
    get_target_property(type fovea_${module} TYPE)
    if(NOT type STREQUAL "INTERFACE_LIBRARY")
      list(APPEND objects $<TARGET_OBJECTS:fovea_${module}>)
    endif()
  endforeach()

  # Both kinds come from the same objects, so the second costs a link and not a build.
  add_library(fovea_static STATIC ${objects})
  add_library(fovea_shared SHARED ${objects})
  foreach(kind IN ITEMS static shared)
    add_library(fovea::${kind} ALIAS fovea_${kind})
    set_target_properties(fovea_${kind} PROPERTIES OUTPUT_NAME fovea EXPORT_NAME ${kind} LINKER_LANGUAGE CXX)
    target_include_directories(fovea_${kind} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                    $<INSTALL_INTERFACE:include>)
    target_compile_features(fovea_${kind} PUBLIC cxx_std_20)
    target_link_libraries(fovea_${kind} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  endforeach()
  set_target_properties(fovea_shared PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

  # Hidden visibility does not reach instantiations of std templates; the map does.
  set(map ${PROJECT_SOURCE_DIR}/cmake/fovea.map)
  target_link_options(fovea_shared PRIVATE LINKER:--version-script=${map})
  set_property(TARGET fovea_shared APPEND PROPERTY LINK_DEPENDS ${map})

  set(kind static)
  if(BUILD_SHARED_LIBS)
    set(kind shared)
  endif()
  add_library(fovea ALIAS fovea_${kind})
  add_library(fovea::fovea ALIAS fovea_${kind})
endfunction()
