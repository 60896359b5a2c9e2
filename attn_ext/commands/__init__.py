"""The subcommands of ``attn-ext``: each module has an ``add_parser`` that declares it, its options and its
run."""


class CommandError(Exception):
    """What the user can mend; its message is shown on one line, without a traceback."""
