"""Write helm/files/rules/ from rules.yaml."""

from __future__ import annotations

from deploy.rules.source import FOLDER, rule_files

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in rule_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / name}")
