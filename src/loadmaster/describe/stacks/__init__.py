"""The named stacks, one file each; `saving` holds the rules that several of them share."""
