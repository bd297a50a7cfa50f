/* Stands in for Pyxis: a task runs in the image that srun names, or in the container of that name.
 *
 * An image is a folder that holds a root. Any other name is only kept: in each case a task finds
 * in its environment what the options said. Slurm calls task_init_privileged as root, goes to the
 * job's folder, and calls task_init as the user. */
#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(bed_containers, 1)

#define KEPT "/run/bed-containers" /* of the node: containers by name */
#define ROOT "/run/bed-root"       /* where a task's root is laid, in its own mount namespace */

enum { IMAGE, MOUNTS, NAME, WORKDIR, ENV, WRITABLE, HOME, NO_HOME, REMAP, NO_REMAP, OPTIONS };

static int take(int which, const char *value, int remote);

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "the image to run in", 1, IMAGE, take},
    {"container-mounts", "FROM:TO,...", "folders seen inside", 1, MOUNTS, take},
    {"container-name", "NAME", "a container to keep", 1, NAME, take},
    {"container-workdir", "FOLDER", "where to start inside", 1, WORKDIR, take},
    {"container-env", "NAME,...", "variables of the job that the image's do not replace", 1, ENV, take},
    {"container-writable", NULL, "let the image be written into", 0, WRITABLE, take},
    {"container-mount-home", NULL, "mount the home folder", 0, HOME, take},
    {"no-container-mount-home", NULL, "leave the home folder out", 0, NO_HOME, take},
    {"container-remap-root", NULL, "be root inside", 0, REMAP, take},
    {"no-container-remap-root", NULL, "be the same user inside", 0, NO_REMAP, take},
    SPANK_OPTIONS_TABLE_END};

static const char *names[] = {"BED_CONTAINER_IMAGE",    "BED_CONTAINER_MOUNTS",
                              "BED_CONTAINER_NAME",     "BED_CONTAINER_WORKDIR",
                              "BED_CONTAINER_ENV",      "BED_CONTAINER_WRITABLE",
                              "BED_CONTAINER_HOME",     "BED_CONTAINER_NO_HOME",
                              "BED_CONTAINER_REMAP",    "BED_CONTAINER_NO_REMAP"};
static char *given[OPTIONS];
static int inside;

static int take(int which, const char *value, int remote) {
    given[which] = strdup(value ? value : "1"); /* Slurm takes its text back */
    return 0;
}

/* The folder that the task's root is: of the image, or what a container of that name was made of. */
static const char *image_of_task(void) {
    static char path[PATH_MAX];
    char link[PATH_MAX] = "";
    struct stat entry;
    if (given[NAME]) snprintf(link, sizeof link, KEPT "/%s", given[NAME]);
    if (given[IMAGE]) {
        if (stat(given[IMAGE], &entry) || !S_ISDIR(entry.st_mode)) return NULL;
        mkdir(KEPT, 0755);
        if (*link && !access(KEPT, W_OK)) (void)!symlink(given[IMAGE], link);
        return given[IMAGE];
    }
    return *link && realpath(link, path) ? path : NULL;
}

int slurm_spank_task_init_privileged(spank_t job, int count, char **words) {
    const char *image = image_of_task();
    char folder[PATH_MAX] = "/";
    int status = 0;
    if (!image) return 0;
    spank_getenv(job, "PWD", folder, sizeof folder); /* Slurm goes there before task_init */
    mkdir(ROOT, 0755);
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) return -1;
    pid_t child = fork();
    if (!child) {
        execl("/bin/sh", "sh", words[0], image, given[MOUNTS] ? given[MOUNTS] : "", ROOT, folder,
              (char *)NULL);
        _exit(127);
    }
    if (waitpid(child, &status, 0) < 0 || status) {
        slurm_error("container: %s cannot be entered", image);
        return -1;
    }
    inside = !chroot(ROOT) && !chdir("/");
    return inside ? 0 : -1;
}

int slurm_spank_task_init(spank_t job, int count, char **words) {
    const char *folder = given[WORKDIR] ? given[WORKDIR] : "/";
    for (int which = 0; which < OPTIONS; which++)
        if (given[which]) spank_setenv(job, names[which], given[which], 1);
    if (!inside) return 0;
    if (chdir(folder)) {
        slurm_error("container: holds no folder %s", folder);
        return -1;
    }
    return spank_setenv(job, "PWD", folder, 1) ? -1 : 0;
}
