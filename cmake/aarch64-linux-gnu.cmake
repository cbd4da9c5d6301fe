# Toolchain: 64-bit Arm from any Debian or Ubuntu machine, tests run under qemu-user.
#   cmake --preset arm
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)

# fmt and Highway serve as headers alone, so the host's packages do for any target.
file(GLOB fmt_DIR /usr/lib/*-linux-gnu/cmake/fmt)
