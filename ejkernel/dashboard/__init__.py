"""The pages of `ejkernel dashboard`: recorded runs, the store, and what is being tuned now.

::

    contents = Contents(store)          what there is to show: read from disk, nothing is kept open
    app = make_app(contents, Access())  pages and JSON of it, and who may see them
    serve(app, listen("127.0.0.1", 0))  until Ctrl-C

It reads records, stores and the files of `ejkernel.ops.tuner.progress_file`, and writes nothing.
Starlette and uvicorn, the extra `dashboard`, are imported by `app` and `server` alone.
"""
