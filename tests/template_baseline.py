"""Write the table of results of each chat with each published template, for the templates' proof.

Run this with the code that later code is compared with; no test runs it. With names of templates it
writes only their rows again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from worlds.models.published_templates import published, tokenizer_of
from worlds.models.template_chats import CHATS
from worlds.models.template_player import Player

TABLE = Path(__file__).parent / "environment" / "template_baseline.json"


async def main(wanted: set[str]) -> None:
    table = json.loads(TABLE.read_text()) if wanted else {}
    for template in published():
        if not wanted or template.name in wanted:
            with tempfile.TemporaryDirectory() as directory:
                player = Player(tokenizer_of(template), Path(directory))
                table[template.name] = {
                    chat.name: (await player.play(chat)).summary for chat in CHATS
                }
                player.close()
            print(template.name, flush=True)
    rows = [f'  "{name}": {json.dumps(row)}' for name, row in sorted(table.items())]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    asyncio.run(main(set(sys.argv[1:])))
