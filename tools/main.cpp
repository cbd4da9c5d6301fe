#include "command.hpp"

int main(int argc, char** argv) {
  return fovea::tools::run_fovea({argv + (argc > 0 ? 1 : 0), argv + argc});
}
