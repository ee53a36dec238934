"""Who runs where: choices as pure functions over loads."""
