"""The `kvern` command. Each command's own imports happen inside it, so that `kvern --help` is quick."""
