"""The error a person made and can mend."""


class UserError(ValueError):
    """Bad input: one line that names the value, what was expected and what to do.

    The command line prints it as `idn: error: ...` and exits with code 2.
    """
