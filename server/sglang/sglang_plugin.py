"""The entry point that SGLang calls in each of its processes.

SGLang logs what a plugin raises, and starts without it. So the first thing is that nothing is unpickled any more, and
only a plugin that is installed completely runs processors.
"""

from __future__ import annotations

from .refusal import logger, refuse_requests, refuse_unpickling


def load() -> None:
    """Install the plugin in this process of SGLang.

    Raises:
        SystemExit: processors can neither be run nor be refused. SGLang does not start.
    """
    try:
        refuse_unpickling()
        from .installation import install

        install()
    except Exception:  # noqa: BLE001  # boundary: SGLang
        logger.exception("logitship cannot run custom logit processors in this SGLang: all of them are refused")
        try:
            refuse_requests()
        except Exception as error:  # boundary: SGLang
            raise SystemExit(
                f"logitship cannot keep this SGLang from unpickling custom logit processors: {error}. Uninstall "
                "logitship, or leave it out of SGLANG_PLUGINS"
            ) from error
