"""Settings of the scripts: the server, the processor that they attach, and a class to parse answers into."""

import json
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

BASE_URL = sys.argv[1]
PROCESSOR = json.loads(sys.argv[2])
"""Fields of a request: the processor prefers the letter O to all others."""


class City(BaseModel):
    """A city, and nothing else: the processor would prefer keys of Os to the end."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]


TOOL = {"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}}
