"""docs/env.md documents every variable that src/core/env.cpp reads, and no other."""

import re

from tree import Finding, Source, main

READER = "src/core/env.cpp"
PAGE = "docs/env.md"


def page_and_code_agree(files: list[Source]) -> list[Finding]:
    texts = {source.path.as_posix(): source.text for source in files}
    read = set(re.findall(r'find\(lookup, "([A-Z_]+)"\)', texts.get(READER, "")))
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", texts.get(PAGE, ""), re.MULTILINE))
    paths = {source.path.as_posix(): source.path for source in files}
    findings = [Finding(paths[READER], 1, f"{name} is read but not in {PAGE}") for name in sorted(read - documented)]
    findings += [Finding(paths[PAGE], 1, f"{name} is documented but not read") for name in sorted(documented - read)]
    if not read:
        findings.append(Finding(paths[READER], 1, "reads no variable that this rule can see"))
    return findings


if __name__ == "__main__":
    main(page_and_code_agree)
