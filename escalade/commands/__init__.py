"""The commands of `escalade`, one file each: options, action, printing."""
