"""The screens: modules with NAME, TITLE and ``screen(setup, jobs)``, which returns what is shown."""
