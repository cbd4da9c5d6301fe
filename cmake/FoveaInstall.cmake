# install(): headers, both kinds of libfovea, the command, and a package that find_package(Fovea) finds.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(FOVEA_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Fovea)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS fovea_static fovea_shared EXPORT FoveaTargets)
install(EXPORT FoveaTargets NAMESPACE fovea:: DESTINATION ${FOVEA_CMAKE_DIR})
if(TARGET fovea_command)
  install(TARGETS fovea_command)
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/FoveaConfig.cmake.in ${PROJECT_BINARY_DIR}/FoveaConfig.cmake
                              INSTALL_DESTINATION ${FOVEA_CMAKE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/FoveaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/FoveaConfig.cmake ${PROJECT_BINARY_DIR}/FoveaConfigVersion.cmake
        DESTINATION ${FOVEA_CMAKE_DIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
