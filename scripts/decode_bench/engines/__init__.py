"""The engines that are compared, one a module: each is imported only in the process that runs it."""
