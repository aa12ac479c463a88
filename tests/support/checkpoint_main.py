"""Starts `checkpoint_worker`. Saving spawns a process that imports the started file once more, so
this one imports nothing heavy before it knows that it is the first."""

if __name__ == "__main__":
    from tests.support.checkpoint_worker import main

    main()
elif __name__ == "__mp_main__":
    from megatron_ext.checkpoint.orphan import end_with_parent

    end_with_parent()
