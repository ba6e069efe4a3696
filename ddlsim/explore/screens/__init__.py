"""The screens: modules with NAME, TITLE and ``screen(setup, jobs)``, which returns the content."""
