"""Starts `layout_worker`. Saving spawns a process that imports the started file once more, so this
one imports nothing before it knows that it is the first."""

if __name__ == "__main__":
    from tests.support.layout_worker import main

    main()
